"""Buffers that hold a batch's rows on device, and the launch that fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mstar_plugin.kv.host_index import PinnedIndexRing
from mstar_vllm.device_kernels import COLUMNS_AT_ONCE, compact_rows
from mstar_vllm.device_limits import STAGED_STEPS, DeviceLimits
from mstar_vllm.visibility import IntArray


class BatchTensors(Protocol):
    """What the kernel reads of a batch: `[R, W]`, `[R]` and `[R + 1]`, int32 on device."""

    block_table_tensor: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """page_tokens: tokens released at once. block_tokens: tokens of a table entry, a divisor."""

    page_tokens: int
    block_tokens: int

    def blocks(self, tokens: int) -> int:
        """Table entries for `tokens` tokens. Example: blocks of 16, 33 tokens -> 3."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Protected pages that the rows of one batch see apart from the others, all on device.

    tables: `[V, H]`; seq_lens: `[V]`, 0 where a row sees them with the others; turns: `[V]`, tokens
    that a row's queries turn back by.
    """

    tables: torch.Tensor
    seq_lens: torch.Tensor
    turns: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowViews:
    """Tables `[V, W]`, lengths `[V]` and boundaries `[V + 1]` of the rows of one batch."""

    tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    head: HeadRows


class RowBuffers:
    """Tables `[V, W]`, lengths `[V]` and boundaries `[V + 1]` of rows, int32 on device, and what
    they see apart: `head_width` columns, 0 where all is seen together.

    Where `is_fixed` their addresses never change, and a batch that does not fit is a RuntimeError;
    else they grow.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        device: torch.device,
        *,
        is_fixed: bool,
        head_width: int = 0,
    ) -> None:
        self._device = device
        self._is_fixed = is_fixed
        self.head_width = head_width
        self._allocate(num_rows, width)

    def reserve(self, num_rows: int, width: int) -> None:
        """Make room for `num_rows` rows of `width` columns."""
        rows, columns = self.tables.shape
        if num_rows <= rows and width <= columns:
            return
        if self._is_fixed:
            raise RuntimeError(
                f"mstar's fixed buffers hold {rows} rows of {columns} blocks, got a batch of "
                f"{num_rows} rows of {width}"
            )
        self._allocate(max(num_rows, rows), max(width, columns))

    def views(self, num_rows: int) -> RowViews:
        """The first `num_rows` rows; the same tensors for the same number."""
        views = self._views.get(num_rows)
        if views is None:
            views = RowViews(
                tables=self.tables[:num_rows],
                seq_lens=self.seq_lens[:num_rows],
                query_start=self.query_start[: num_rows + 1],
                head=HeadRows(
                    tables=self.head.tables[:num_rows],
                    seq_lens=self.head.seq_lens[:num_rows],
                    turns=self.head.turns[:num_rows],
                ),
            )
            self._views[num_rows] = views
        return views

    def _allocate(self, num_rows: int, width: int) -> None:
        self._views: dict[int, RowViews] = {}
        self.tables = self._zeros(num_rows, width)
        self.seq_lens = self._zeros(num_rows)
        self.query_start = self._zeros(num_rows + 1)
        self.head = HeadRows(
            tables=self._zeros(num_rows, self.head_width),
            seq_lens=self._zeros(num_rows),
            turns=self._zeros(num_rows),
        )

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self._device)


class RowPlans:
    """`[2, V]` int32 on device: each row's request and its number among that request's rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = PinnedIndexRing(4096, STAGED_STEPS, per_plan=1)
        self._staged = torch.zeros(2, 0, dtype=torch.int32, device=device)

    def of_requests(self, request: IntArray) -> torch.Tensor:
        """The plan of rows in the order of `request`, `[V]`, copied without waiting."""
        count = len(request)
        if self._staged.shape[1] < count:
            self._staged = torch.zeros(2, 2 * count, dtype=torch.int32, device=self._device)
        self._ring.begin_plan()
        pair = np.stack([request, offsets_of(request)]).astype(np.int32)
        staged = self._ring.take(pair.reshape(-1)).view(2, count)
        return self._staged[:, :count].copy_(staged, non_blocking=True)

    def uniform(self, num_requests: int, rows_each: int) -> torch.Tensor:
        """A plan that gives every request `rows_each` rows."""
        rows = torch.arange(num_requests * rows_each, device=self._device)
        return torch.stack([rows // rows_each, rows % rows_each]).to(torch.int32)


def offsets_of(request: IntArray) -> IntArray:
    """Number of each row among those of its request. Example: [0, 0, 1, 1] -> [0, 1, 0, 1]."""
    rows = np.arange(len(request))
    begins = np.append(True, request[1:] != request[:-1])
    offsets: IntArray = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return offsets


def fill_rows(
    out: RowBuffers,
    batch: BatchTensors,
    limits: DeviceLimits,
    pages: Pages,
    num_rows: int,
    plan: torch.Tensor | None,
) -> None:
    """Launch the kernel: rows are the batch's requests where `plan` is None."""
    tables, unused, slots = batch.block_table_tensor, batch.seq_lens, limits.slots
    compact_rows[(num_rows,)](
        tables,
        tables.stride(0),
        batch.seq_lens,
        batch.query_start_loc,
        limits.dense,
        limits.head_pages,
        limits.turned_pages,
        unused if slots is None else slots,
        unused if plan is None else plan[0],
        unused if plan is None else plan[1],
        out.tables,
        out.tables.stride(0),
        out.seq_lens,
        out.query_start,
        out.head.tables,
        out.head.tables.stride(0),
        out.head.seq_lens,
        out.head.turns,
        num_rows,
        0 if slots is None else slots.shape[0],
        tables.shape[1] - 1,
        PAGE_TOKENS=pages.page_tokens,
        BLOCK_TOKENS=pages.block_tokens,
        PER_ROW=limits.per_row,
        BY_SLOT=slots is not None,
        SPLIT=plan is not None,
        TURNS=out.head_width > 0,
        COLUMNS=COLUMNS_AT_ONCE,
    )
