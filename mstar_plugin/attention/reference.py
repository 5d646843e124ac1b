"""The specification of paged attention: row by row, dense, in float32, with an explicit mask."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar_plugin.attention.call import AttentionParams, AttentionResult, row_kv_lens
from mstar_plugin.kv.plan import PagedIndptrs


class ReferenceAttention:
    """Attention of one step; any device, any size that fits in memory."""

    def __init__(self, indptrs: PagedIndptrs, params: AttentionParams) -> None:
        self._params = params
        self._queries = _ranges(indptrs.qo_indptr)
        self._pages = [
            indptrs.paged_kv_indices[first:last].tolist()
            for first, last in _ranges(indptrs.paged_kv_indptr)
        ]
        self._kv_lens = row_kv_lens(indptrs, params.page_size).tolist()

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult:
        """query `[T, Hq, D]`, kv_cache one layer of the pool."""
        output = query.new_zeros(query.shape[0], query.shape[1], self._params.value_dim)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        for (first, last), pages, kv_len in zip(
            self._queries, self._pages, self._kv_lens, strict=True
        ):
            keys, values = read_row(kv_cache, pages, self._params)
            mask = visible_mask(last - first, kv_len, keys.shape[0], self._params.causal)
            row = masked_attention(
                query[first:last], keys, values, mask.to(query.device), self._params
            )
            output[first:last] = row.output
            lse[first:last] = row.lse
        return AttentionResult(output, lse)


def read_row(kv_cache: Tensor, pages: list[int], params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Keys `[slots, Hk, D]` and values `[slots, Hk, Dv]` of all slots on the pages, float32."""
    row = kv_cache[torch.tensor(pages, dtype=torch.int64, device=kv_cache.device)].float()
    if params.is_latent:
        latent = row.flatten(0, 1).unsqueeze(1)
        return latent, latent[..., : params.value_dim]
    return row[:, 0].flatten(0, 1), row[:, 1].flatten(0, 1)


def visible_mask(num_queries: int, kv_len: int, num_slots: int, causal: bool) -> Tensor:
    """bool `[num_queries, num_slots]`: the slots each query sees.

    Example: 2 queries, 3 tokens on 4 slots, causal -> [[1, 1, 0, 0], [1, 1, 1, 0]].
    """
    slots = torch.arange(num_slots)
    visible = torch.full((num_queries, 1), kv_len)
    if causal:
        visible = visible - num_queries + 1 + torch.arange(num_queries)[:, None]
    return slots < visible


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams
) -> AttentionResult:
    """Attention of `[Q, Hq, D]` over `[K, Hk, D]` and `[K, Hk, Dv]` where mask `[Q, K]` is True.

    Slots no query sees are replaced, not weighted by zero: what they hold cannot reach the result.
    """
    group = params.num_qo_heads // params.num_kv_heads
    keys = keys.repeat_interleave(group, dim=1)
    values = values.masked_fill(~mask.any(0)[:, None, None], 0.0)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", query.float(), keys) * params.score_scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    scores = torch.where(mask[:, None, :], scores, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.where(mask[:, None, :], torch.exp(scores - lse[..., None]), 0.0)
    output = torch.einsum("qhk,khd->qhd", weights, values)
    return AttentionResult(output.to(query.dtype), lse)


def _ranges(offsets: Tensor) -> list[tuple[int, int]]:
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:], strict=False))
