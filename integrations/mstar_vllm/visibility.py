"""The batch transform: vLLM's batch, cut into rows that each see one set of pages.

A request's chunk is split wherever a page is released inside it; each resulting row gets the table
of the pages it sees and a length to match. Rotary positions are in the cached keys already and the
kernels are bottom-right causal, so attention over the shortened row is exact. The slot mapping is
left alone.

Letters in shapes: `R` requests, `V` rows after the split, `W` table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import dense_tokens, protected_pages
from mstar_vllm.positions import ROLLING, positions_of

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

IntArray = npt.NDArray[np.int64]
UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Retention of the rows of one batch, as the two numbers the arithmetic needs.

    dense: `[R]` or scalar int64, tokens stored before the release clock starts; `UNBOUNDED` for
    none. head_pages: `[R]` or scalar int64, pages that are never released. page_tokens: tokens of a
    page. rolling: `[R]` or scalar bool, whether the head pages are seen at a distance that stays.
    """

    dense: Any
    head_pages: Any
    page_tokens: int
    rolling: Any = False

    @classmethod
    def of_policy(cls, policy: RetentionPolicy, page_tokens: int) -> RowLimits:
        """Limits of a batch whose requests all have the same policy."""
        dense, head = limits_of(policy, page_tokens)
        return cls(
            dense=dense,
            head_pages=head,
            page_tokens=page_tokens,
            rolling=positions_of(policy) == ROLLING,
        )

    @classmethod
    def of_policies(cls, policies: Sequence[RetentionPolicy | None], page_tokens: int) -> RowLimits:
        """Limits of a batch whose requests have these policies."""
        known = {
            policy: (*limits_of(policy, page_tokens), positions_of(policy) == ROLLING)
            for policy in set(policies)
        }
        columns = np.array([known[policy] for policy in policies], dtype=np.int64).reshape(-1, 3)
        return cls(
            dense=columns[:, 0],
            head_pages=columns[:, 1],
            page_tokens=page_tokens,
            rolling=columns[:, 2].astype(bool),
        )

    def reach(self) -> int:
        """The longest sequence of which no page is released, whatever its row."""
        return int(np.min(self.dense)) + self.page_tokens


def limits_of(policy: RetentionPolicy | None, page_tokens: int) -> tuple[int, int]:
    """(dense tokens, protected pages) of a policy; (`UNBOUNDED`, 0) of none."""
    if policy is None:
        return UNBOUNDED, 0
    budget, prefix = policy.context_budget, policy.protected_prefix
    return (
        dense_tokens(budget, prefix, page_tokens),
        protected_pages(prefix, page_tokens),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows after the split, all `[V]` int64.

    request: index of the request in the batch. query_lens: tokens of the row. seq_lens: visible
    tokens up to the row's end.
    """

    request: IntArray
    query_lens: IntArray
    seq_lens: IntArray


@dataclass(frozen=True, slots=True)
class SplitRows(Rows):
    """Rows that see the same pages. released: `[V]` int64, pages the row does not see."""

    released: IntArray


def split_rows(query_lens: IntArray, seq_lens: IntArray, limits: RowLimits) -> SplitRows:
    """Cut each request's tokens where its released pages change.

    query_lens, seq_lens: `[R]` tokens of this step, and stored tokens including them.
    Example: page 8, dense 31, one request of 20 new tokens ending at 50: released pages go
    0 (positions 30 to 38), 1 (39 to 46), 2 (47 to 49), so three rows of 9, 8 and 3 tokens with
    lengths 39, 47 - 8 = 39 and 50 - 16 = 34.
    """
    page = limits.page_tokens
    first = seq_lens - query_lens
    before = np.maximum(0, (first - limits.dense) // page)
    after = np.maximum(before, (seq_lens - 1 - limits.dense) // page)
    counts = after - before + 1
    request = np.repeat(np.arange(len(seq_lens)), counts)
    offset = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    released = before[request] + offset
    dense = np.broadcast_to(limits.dense, seq_lens.shape)[request]
    start = np.where(offset == 0, first[request], dense + released * page)
    is_last = released == after[request]
    end = np.where(is_last, seq_lens[request], dense + (released + 1) * page)
    return SplitRows(
        request=request,
        released=released,
        query_lens=end - start,
        seq_lens=end - released * page,
    )


def compact_tables(
    tables: npt.NDArray[np.int32],
    rows: SplitRows,
    limits: RowLimits,
    block_tokens: int,
    head_shift: IntArray | None = None,
) -> npt.NDArray[np.int32]:
    """Tables of the rows with the released pages' columns left out, `[V, W']` int32.

    tables: `[R, W]` in kernel blocks of `block_tokens` tokens, which divide the page. head_shift:
    `[V]` pages that the row's head is read behind its own place, None for none.
    """
    per_page = limits.page_tokens // block_tokens
    width = max(1, -(-int(rows.seq_lens.max()) // block_tokens))
    columns = np.arange(width)
    head = np.broadcast_to(limits.head_pages, (len(tables),))[rows.request] * per_page
    gap = rows.released * per_page
    shift = 0 if head_shift is None else (head_shift * per_page)[:, None]
    source = columns + np.where(columns >= head[:, None], gap[:, None], shift)
    np.minimum(source, tables.shape[1] - 1, out=source)
    visible: npt.NDArray[np.int32] = tables[rows.request[:, None], source]
    return visible


def transform(
    batch: CommonAttentionMetadata, limits: RowLimits | None, block_tokens: int
) -> CommonAttentionMetadata:
    """The batch as its rows see it; the same object where no page is released.

    For batches in host memory. `limits` is None where nothing is bounded.
    """
    if limits is None or batch.max_seq_len <= limits.reach():
        return batch
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    if not np.any(seq_lens > limits.dense + limits.page_tokens):
        return batch
    query_lens = np.diff(batch.query_start_loc.numpy()).astype(np.int64)
    rows = split_rows(query_lens, seq_lens, limits)
    tables = compact_tables(batch.block_table_tensor.numpy(), rows, limits, block_tokens)
    return with_rows(batch, rows, tables)


def with_rows(
    batch: CommonAttentionMetadata, rows: Rows, tables: npt.NDArray[np.int32]
) -> CommonAttentionMetadata:
    """The batch made of `rows`, whose pages are in `tables`, `[V, W']`."""
    query_start = np.zeros(len(rows.request) + 1, dtype=np.int32)
    np.cumsum(rows.query_lens, out=query_start[1:])
    query_start_loc = torch.from_numpy(query_start)
    seq_lens = torch.from_numpy(rows.seq_lens.astype(np.int32))
    request = torch.from_numpy(rows.request)
    return batch.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(rows.request),
        max_query_len=int(rows.query_lens.max()),
        max_seq_len=int(rows.seq_lens.max()),
        block_table_tensor=torch.from_numpy(tables),
        is_prefilling=_per_row(batch.is_prefilling, request),
        causal=_per_row(batch.causal, request),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _per_row(values: Any, request: torch.Tensor) -> Any:
    return values[request] if isinstance(values, torch.Tensor) else values
