"""The rule of a ring group's batches on CUDA: planned on the host, filled in on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mstar_vllm.device_kernels import COLUMNS_AT_ONCE
from mstar_vllm.device_ring_kernel import frame_rows
from mstar_vllm.ring_visibility import RingView, seen_frames, split_frames
from mstar_vllm.visibility import IntArray, Rows

if TYPE_CHECKING:
    import torch

    from mstar_vllm.device_rows import BatchTensors, Pages, RowBuffers


class DeviceRing:
    """Every batch's rule, for requests bring none; see `RowRule` and `RowRules`."""

    def __init__(self, view: RingView) -> None:
        self._view = view

    @property
    def always(self) -> DeviceRing:
        return self

    def current(self, num_requests: int) -> DeviceRing:
        return self

    def most_visible(self) -> int:
        """A frame that is not kept sees every bucket beside itself, one that is kept takes one."""
        view = self._view
        return (view.buckets + (view.dilation > 1)) * view.frame_tokens

    def sees_all(self, stored: IntArray) -> bool:
        return not np.any(stored > self._view.reach())

    def split(self, query_lens: IntArray, stored: IntArray) -> Rows:
        return split_frames(query_lens, stored, self._view)

    def possible(self, query_lens: IntArray, stored: IntArray) -> IntArray:
        """The request of each row that a batch can need, however its tokens lie in frames.

        Example: frames of 16, chunks of 17 and 1 tokens -> [0, 0, 1].
        """
        crossings = -(-np.maximum(query_lens - 1, 0) // self._view.frame_tokens)
        return np.repeat(np.arange(len(stored)), 1 + crossings)

    def visible(self, stored: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        size = self._view.frame_tokens
        frame = np.maximum(0, stored.astype(np.int64) - 1) // size
        _, num_seen = seen_frames(frame, self._view)
        seen: npt.NDArray[np.int32] = (stored + (num_seen - frame) * size).astype(np.int32)
        return seen

    def longest(self, most_stored: int, stored: npt.NDArray[np.int32] | None) -> int:
        return min(most_stored, self.most_visible())

    def fill(
        self,
        out: RowBuffers,
        batch: BatchTensors,
        pages: Pages,
        num_rows: int,
        plan: torch.Tensor | None,
    ) -> None:
        tables = batch.block_table_tensor
        frame_rows.launch(
            num_rows,
            tables,
            tables.stride(0),
            batch.seq_lens,
            batch.query_start_loc,
            batch.seq_lens if plan is None else plan,
            0 if plan is None else plan.stride(0),
            out.tables,
            out.tables.stride(0),
            out.numbers,
            out.numbers.stride(0),
            num_rows,
            tables.shape[1] - 1,
            DILATION=self._view.dilation,
            BUCKETS=self._view.buckets,
            FRAME_TOKENS=pages.page_tokens,
            BLOCK_TOKENS=pages.block_tokens,
            SPLIT=plan is not None,
            COLUMNS=COLUMNS_AT_ONCE,
        )
