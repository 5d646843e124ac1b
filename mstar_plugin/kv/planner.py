"""From an admitted step to its plan: views, index arrays and write rows, as array operations.

Letters: `R` rows of a plan label, `T` its tokens, `S` page size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar_plugin.kv.flight import Flight
from mstar_plugin.kv.plan import (
    HostLens,
    KVPlanOutput,
    PagedIndptrs,
    PinnedIndexRing,
    SequenceView,
)
from mstar_plugin.kv.streams import IntArray, StreamTable

Int32Array = npt.NDArray[np.int32]

# A table of leading columns costs a tenth of comparing, and at this width 16 KiB.
MAX_TABLE_WIDTH = 128


@dataclass(frozen=True, slots=True)
class PendingFork:
    """A fork target as it will be once the copy is made: its pages, its length, its generation."""

    pages: list[int]
    stored: int
    generation: int


class _Rows(NamedTuple):
    """One plan label: counts `[R]` (`lengths` = `stored` + `spans`) and `pages` `[R, width]`.

    `decode`: every row computes one token.
    """

    stored: IntArray
    spans: IntArray
    lengths: IntArray
    num_pages: IntArray
    generation: IntArray
    pages: Int32Array
    decode: bool


def plan_label(
    flight: Flight,
    label: str,
    table: StreamTable,
    page_size: int,
    pending: Mapping[int, PendingFork],
    ring: PinnedIndexRing | None,
) -> tuple[KVPlanOutput, IntArray]:
    """The plan of one label, and for each of its tokens the cache row `page * S + slot` `[T]`."""
    part = flight.groups[label]
    rows = _gather(flight, part, table, page_size, pending)
    indptrs, page_ids = _indptrs(rows, page_size, ring)
    segments = flight.segments[part]
    pages, slots = _ends(indptrs, page_ids) if rows.decode else _addresses(rows, page_size)

    def build_views() -> list[SequenceView]:
        bounds = [0, *rows.num_pages.cumsum().tolist()]
        listed = page_ids.tolist()
        return [
            SequenceView(s[0], s[1], listed[first:last], length, s[2], 0, generation)
            for s, first, last, length, generation in zip(
                segments,
                bounds,
                bounds[1:],
                rows.lengths.tolist(),
                rows.generation.tolist(),
                strict=False,
            )
        ]

    output = KVPlanOutput(
        indptrs,
        decode_pages=pages if rows.decode else None,
        decode_offsets=slots if rows.decode else None,
        rows=flight.names[part],
        view_builder=build_views,
    )
    return output, pages.astype(np.int64) * page_size + slots


def read_rows(indptrs: PagedIndptrs, page_size: int) -> Tensor:
    """Cache row of every resident token of a plan, stream after stream: int64 `[sum(kv_lens)]`."""
    page_ids = indptrs.paged_kv_indices.numpy().astype(np.int64)
    counts = np.diff(indptrs.paged_kv_indptr.numpy())
    filled = np.full(len(page_ids), page_size, dtype=np.int64)
    last = indptrs.paged_kv_indptr.numpy()[1:][counts > 0] - 1
    filled[last] = indptrs.paged_kv_last_page_len.numpy()[counts > 0]
    slots = np.arange(page_size)
    grid = page_ids[:, None] * page_size + slots
    return torch.from_numpy(grid[slots < filled[:, None]])


def _gather(
    flight: Flight,
    part: slice,
    table: StreamTable,
    page_size: int,
    pending: Mapping[int, PendingFork],
) -> _Rows:
    rows, spans = flight.rows[part], flight.spans[part]
    readers = flight.readers[part]
    stored = table.stored[readers]
    generation = table.generation[readers]
    for index, fork in _pending_rows(rows, pending):
        stored[index], generation[index] = fork.stored, fork.generation
    lengths = stored + spans
    num_pages = (lengths + (page_size - 1)) // page_size
    width = int(num_pages.max(initial=0))
    pages = _page_matrix(table, rows, width)
    for index, fork in _pending_rows(rows, pending):
        pages[index, : num_pages[index]] = fork.pages[: num_pages[index]]
    decode = flight.decode or bool((spans == 1).all())
    return _Rows(stored, spans, lengths, num_pages, generation, pages, decode)


def _pending_rows(
    rows: IntArray, pending: Mapping[int, PendingFork]
) -> list[tuple[int, PendingFork]]:
    if not pending:
        return []
    return [(i, pending[row]) for i, row in enumerate(rows.tolist()) if row in pending]


def _page_matrix(table: StreamTable, rows: IntArray, width: int) -> Int32Array:
    known = min(width, table.pages.shape[1])
    pages: Int32Array = table.pages[:, :known].take(rows, axis=0)
    # Only a sink can be longer than every stream that holds pages.
    return pages if known == width else np.pad(pages, ((0, 0), (0, width - known)))


def _indptrs(
    rows: _Rows, page_size: int, ring: PinnedIndexRing | None
) -> tuple[PagedIndptrs, Int32Array]:
    num_pages = rows.num_pages.astype(np.int32)
    page_ids = rows.pages[_leading(num_pages, rows.pages.shape[1])]
    lengths = rows.lengths.astype(np.int32)
    last = lengths - np.maximum(num_pages - 1, 0) * page_size
    place = torch.from_numpy if ring is None else ring.take
    indptrs = PagedIndptrs(
        place(np.arange(len(lengths) + 1, dtype=np.int32) if rows.decode else _offsets(rows.spans)),
        place(_offsets(num_pages)),
        place(page_ids),
        place(last),
        torch.from_numpy(lengths).as_subclass(HostLens),
    )
    return indptrs, page_ids


def _leading(counts: Int32Array, width: int) -> npt.NDArray[np.bool_]:
    """Bool `[R, width]`, True in the first `counts` columns of each row."""
    if width <= MAX_TABLE_WIDTH:
        return _leading_table(width).take(counts, axis=0)
    return np.arange(width, dtype=np.int32) < counts[:, None]


@cache
def _leading_table(width: int) -> npt.NDArray[np.bool_]:
    return np.tri(width + 1, width, k=-1, dtype=np.bool_)


def _offsets(counts: IntArray | Int32Array) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    counts.cumsum(dtype=np.int32, out=offsets[1:])
    return offsets


def _addresses(rows: _Rows, page_size: int) -> tuple[Int32Array, IntArray]:
    """Page and slot of each token the step writes, `[T]` each."""
    spans = rows.spans
    row_of = np.repeat(np.arange(len(spans)), spans)
    first = rows.stored - (spans.cumsum() - spans)
    positions = first[row_of] + np.arange(len(row_of))
    number = positions // page_size
    return rows.pages[row_of, number], positions - number * page_size


def _ends(indptrs: PagedIndptrs, page_ids: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Page and slot of the last token of each row, `[R]` each: what a decode step writes."""
    last_page = indptrs.paged_kv_indptr.numpy()[1:] - 1
    return page_ids[last_page], indptrs.paged_kv_last_page_len.numpy() - 1
