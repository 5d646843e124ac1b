"""Rows that see the protected keys at a distance that stays.

Such a row reads copies of its head pages, turned by the tokens that were released for it. A request
has room for one set of copies, behind the pages that its tokens fill. Rows of one request that need
more sets than there is room for follow one another, in waves: each wave makes its copies, then
attends. Pages that a chunk fills and that no later row sees are room as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from mstar_vllm.copy_ledger import BlockWrites, Copies, CopyLedger, IntArray
from mstar_vllm.visibility import RowLimits, SplitRows, compact_tables, split_rows, with_rows

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that attend at once. tokens: `[T]` int64, their places in the step's batch, None where
    the wave is the whole batch. copies: made before the rows attend.
    """

    batch: CommonAttentionMetadata
    tokens: torch.Tensor | None
    copies: Copies


class RollingRows:
    """Cuts the batches of one group of layers into waves. drafts: speculative tokens a request can
    bring to a step, which may have to be taken back.
    """

    def __init__(self, block_tokens: int, writes: BlockWrites, drafts: int = 0) -> None:
        self._block_tokens = block_tokens
        self._drafts = drafts
        self._ledger = CopyLedger(writes)

    def waves(self, batch: CommonAttentionMetadata, limits: RowLimits) -> list[Wave]:
        """The waves of a batch in host memory, whose writes are noted; none where no row reads
        copies.
        """
        if batch.max_seq_len <= limits.reach():
            return []
        seq_lens = batch.seq_lens.numpy().astype(np.int64)
        query_lens = np.diff(batch.query_start_loc.numpy()).astype(np.int64)
        rows = split_rows(query_lens, seq_lens, limits)
        shift = head_shifts(rows, limits)
        if not shift.any():
            return []
        order = use_dead_pages(rows, limits, shift, query_lens > 1 + self._drafts)
        tables = batch.block_table_tensor.numpy()
        visible = compact_tables(tables, rows, limits, self._block_tokens, shift)
        return [
            self._wave(batch, rows, order == number, visible, head_copies)
            for number, head_copies in enumerate(self._copies(tables, rows, limits, shift, order))
        ]

    def _copies(
        self,
        tables: npt.NDArray[np.int32],
        rows: SplitRows,
        limits: RowLimits,
        shift: IntArray,
        order: IntArray,
    ) -> list[Copies]:
        """Per wave, the copies that are not in place yet when its turn comes."""
        per_page = limits.page_tokens // self._block_tokens
        head = np.broadcast_to(limits.head_pages, (len(tables),))[rows.request]
        found = []
        for number in range(int(order.max()) + 1):
            readers = np.flatnonzero((order == number) & (shift > 0))
            row = np.repeat(readers, head[readers] * per_page)
            column = np.concatenate([np.arange(head[i] * per_page) for i in readers])
            request = rows.request[row]
            copies = Copies(
                sources=tables[request, column].astype(np.int64),
                targets=tables[request, column + shift[row] * per_page].astype(np.int64),
                turns=rows.released[row] * limits.page_tokens,
            )
            found.append(self._ledger.take_missing(copies))
        return found

    def _wave(
        self,
        batch: CommonAttentionMetadata,
        rows: SplitRows,
        chosen: npt.NDArray[np.bool_],
        tables: npt.NDArray[np.int32],
        copies: Copies,
    ) -> Wave:
        if chosen.all():
            return Wave(batch=with_rows(batch, rows, tables), tokens=None, copies=copies)
        starts = np.cumsum(rows.query_lens) - rows.query_lens
        tokens = np.concatenate(
            [starts[i] + np.arange(rows.query_lens[i]) for i in np.flatnonzero(chosen)]
        )
        part = SplitRows(
            request=rows.request[chosen],
            query_lens=rows.query_lens[chosen],
            seq_lens=rows.seq_lens[chosen],
            released=rows.released[chosen],
        )
        smaller = with_rows(batch, part, np.ascontiguousarray(tables[chosen]))
        return Wave(
            batch=smaller.replace(num_actual_tokens=len(tokens)),
            tokens=torch.from_numpy(tokens),
            copies=copies,
        )


def written_blocks(batch: CommonAttentionMetadata, block_tokens: int) -> IntArray:
    """The blocks that a batch in host memory writes its tokens to, each once."""
    slots = batch.slot_mapping[: batch.num_actual_tokens].numpy()
    blocks: IntArray = np.unique(slots[slots >= 0] // block_tokens)
    return blocks


def head_shifts(rows: SplitRows, limits: RowLimits) -> IntArray:
    """Pages between a row's head and the copies it reads, `[V]`; 0 where it reads the head itself.

    All rows of a request have their copies at one place: behind every page that this step fills.
    Example: page 8, dense 31, one protected page, released 2: the copy is page 7 (5 for the last
    query's and one more for each release), so 7.
    """
    num_requests = int(rows.request.max()) + 1
    last = np.zeros(num_requests, dtype=np.int64)
    np.maximum.at(last, rows.request, rows.released)
    dense, head, rolling = (
        np.broadcast_to(values, (num_requests,))
        for values in (limits.dense, limits.head_pages, limits.rolling)
    )
    place = (dense - 1) // limits.page_tokens + last + 2
    reads = (rolling & (head > 0))[rows.request] & (rows.released > 0)
    return np.where(reads, place[rows.request], 0)


def use_dead_pages(
    rows: SplitRows, limits: RowLimits, shift: IntArray, is_settled: npt.NDArray[np.bool_]
) -> IntArray:
    """The wave of each row, `[V]`; `shift` of rows whose copies lie in dead pages is changed.

    A request's rows that read copies go one after the other, but as many at once as there is room
    for. is_settled: `[R]`, whether no token of the request's chunk can be taken back, so that what
    its rows have released is dead.
    """
    order = np.zeros(len(shift), dtype=np.int64)
    dense, head = (
        np.broadcast_to(values, is_settled.shape) for values in (limits.dense, limits.head_pages)
    )
    begins = np.searchsorted(rows.request, np.arange(len(is_settled)))
    for request in np.unique(rows.request[shift > 0]):
        own = np.flatnonzero((rows.request == request) & (shift > 0))
        pages = int(head[request])
        # Pages that end before the first release may be other requests' too.
        private = int(dense[request]) // limits.page_tokens + 1
        first = max(pages + int(rows.released[begins[request]]), private)
        begin, wave = 0, 0
        while begin < len(own):
            dead = pages + int(rows.released[own[begin]]) - first
            more = max(0, dead // pages) if is_settled[request] else 0
            group = own[begin : begin + more + 1]
            shift[group[:-1]] = first + pages * np.arange(len(group) - 1)
            order[group] = wave
            begin, wave = begin + len(group), wave + 1
    return order
