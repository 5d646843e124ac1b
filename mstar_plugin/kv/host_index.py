"""Host-side int32 rows: packed quickly, iterated quickly, and kept page-locked until a GPU has read
them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


def int32_array(values: Sequence[int]) -> Int32Array:
    """`values` as an int32 array; `ValueError` for anything but integers of 32 bits.

    `struct` does in 8 ns an entry what `numpy.array` does in 25.
    """
    packed = np.empty(len(values), dtype=np.int32)
    _pack_into(packed, values)
    return packed


class PageIndices(list[int]):
    """A page list that carries its int32 form, so that a stream is packed once and not in every
    step.

    Never change one: make another when the stream's pages change. In every other respect a list.
    """

    __slots__ = ("packed",)

    def __init__(self, pages: Sequence[int] = ()) -> None:
        super().__init__(pages)
        self.packed = int32_array(self).tobytes()


def concatenated_pages(page_lists: Sequence[Sequence[int]]) -> Int32Array:
    """All page ids in one row: a copy of the packed bytes where every list is a `PageIndices`."""
    packed = [pages.packed for pages in page_lists if type(pages) is PageIndices]
    if len(packed) == len(page_lists):
        return np.frombuffer(bytearray().join(packed), dtype=np.int32)
    page_ids: list[int] = []
    for pages in page_lists:
        page_ids += pages
    return int32_array(page_ids)


class HostLens(Tensor):
    """A host int32 row `[rows]` whose iteration yields numpy scalars.

    FlashInfer takes the longest row by iterating (`max(seq_lens).item()`); a tensor would build one
    0-d tensor per row, about 2 us each. Every operation on it gives an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())


class PinnedIndexRing:
    """Page-locked int32 buffers for the index arrays of a plan, so that copies out of them are
    asynchronous.

    `depth` sets of buffers, one per plan. `begin_plan` moves to the next set and waits until the
    copies out of it have completed: those of a plan are covered by an event recorded, on the
    current device's stream that the plan ran on, when the next plan begins. Plans must not overlap.
    A set starts with `per_plan` buffers of `numel` entries and grows with the plan. Without CUDA
    the buffers are ordinary memory and there is nothing to wait for.
    """

    def __init__(self, numel: int = 4096, depth: int = 2, per_plan: int = 4) -> None:
        self._numel = numel
        self._on_cuda = torch.cuda.is_available()
        self._sets = [[self._allocate(numel) for _ in range(per_plan)] for _ in range(depth)]
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._current = -1
        self._taken = 0
        self._stream: torch.cuda.Stream | None = None

    def begin_plan(self) -> None:
        """Move to the next set, waiting on the host until nothing reads it any more."""
        if self._on_cuda:
            self._record_copies()
        self._current = (self._current + 1) % len(self._sets)
        self._taken = 0
        if self._on_cuda:
            self._stream = torch.cuda.current_stream()
            copied = self._copied[self._current]
            if copied is not None:
                copied.synchronize()

    def take(self, values: Sequence[int] | npt.NDArray[Any] | Tensor) -> Tensor:
        """`values` in a buffer that no other take of this plan uses: int32 `[len(values)]`, on the
        host.

        The content stays until `depth` more plans have begun. Without a `begin_plan` the first take
        begins one. `ValueError` for entries that are not integers of 32 bits.
        """
        if self._current < 0:
            self.begin_plan()
        buffer, memory = self._next_buffer(len(values))
        _fill(memory[: len(values)], values)
        return buffer[: len(values)]

    def _next_buffer(self, needed: int) -> tuple[Tensor, Int32Array]:
        buffers = self._sets[self._current]
        if self._taken == len(buffers):
            buffers.append(self._allocate(max(self._numel, needed)))
        elif (size := len(buffers[self._taken][1])) < needed:
            buffers[self._taken] = self._allocate(max(needed, 2 * size))
        self._taken += 1
        return buffers[self._taken - 1]

    def _record_copies(self) -> None:
        if self._stream is None:
            return
        copied = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        self._copied[self._current] = copied

    def _allocate(self, numel: int) -> tuple[Tensor, Int32Array]:
        buffer = torch.empty(numel, dtype=torch.int32, pin_memory=self._on_cuda)
        return buffer, buffer.numpy()


def _fill(target: Int32Array, values: Sequence[int] | npt.NDArray[Any] | Tensor) -> None:
    if isinstance(values, Tensor):
        values = values.numpy()
    if not isinstance(values, np.ndarray):
        _pack_into(target, values)
    elif values.dtype == np.int32:
        target[:] = values
    else:
        _pack_into(target, values.tolist())


def _pack_into(target: Int32Array, values: Sequence[int]) -> None:
    try:
        struct.pack_into(f"{len(values)}i", target.data, 0, *values)
    except struct.error as error:
        raise ValueError(f"index values must be integers of 32 bits: {error}") from error
