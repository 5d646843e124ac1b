"""Buffers that hold a batch's rows on device, and plans of which request a row belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mstar_plugin.kv.host_index import PinnedIndexRing
from mstar_vllm.visibility import IntArray

# More steps than an engine keeps in flight, so that no copy is waited for.
STAGED_STEPS = 4
# Numbers of a row: its length, its first token, the length seen apart, the turn.
NUMBERS = 4
ALIGNED = 16


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

    numbers: `[4, more than V]`, what `seq_lens`, `query_start`, `head.seq_lens` and `head.turns`
    are rows of. Where `is_fixed` their addresses never change, and a batch that does not fit is a
    RuntimeError; else they grow.
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
        self.numbers = self._zeros(NUMBERS, (num_rows // ALIGNED + 1) * ALIGNED)
        self.seq_lens, self.query_start, head_lens, turns = self.numbers
        head_tables = self._zeros(num_rows, self.head_width)
        self.head = HeadRows(tables=head_tables, seq_lens=head_lens, turns=turns)

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
