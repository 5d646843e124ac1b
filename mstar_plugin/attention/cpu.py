"""Paged attention on the CPU: tiles of queries of equal shape are batched, keys come in chunks.

A tile is up to `QUERY_TILE` consecutive queries of one row with the keys the last of them sees.
Tiles with as many queries and about as many keys form a group; a group is computed together, in
float32, one chunk of keys at a time. A slot that is not written yet is never read: its place in a
chunk is taken by the tile's last key, whose score is then hidden.

Letters: `B` tiles of a group, `Q` queries of a tile, `G` query heads per KV head, `K` keys of a
chunk; the others as in `call.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar_plugin.attention.call import AttentionParams, AttentionResult, row_kv_lens
from mstar_plugin.kv.plan import PagedIndptrs

QUERY_TILE = 128
KEY_CHUNK = 512
MAX_ELEMENTS = 1 << 21

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """All tiles of a step, `[tiles]` each: first query token, queries, first entry in the page
    list, and `limits`, the keys the last query sees.
    """

    token: _Ints
    queries: _Ints
    page: _Ints
    limits: _Ints


@dataclass(frozen=True, slots=True)
class _Chunk:
    """`slots` `[B, K]`, counted over the pool; `bound` `[B, 1, Q, K]` float32, -inf for keys a
    query does not see and inf for others, None where every query sees every key.
    """

    slots: Tensor
    bound: Tensor | None


@dataclass(frozen=True, slots=True)
class _Group:
    """`tokens` `[B, Q]` and the chunks of keys they see."""

    tokens: Tensor
    chunks: list[_Chunk]


class _Softmax:
    """Weighted sums over chunks of keys, rescaled whenever a larger score turns up."""

    def __init__(self, scores_shape: tuple[int, ...], value_dim: int) -> None:
        self._maximum = torch.full((*scores_shape, 1), -torch.inf)
        self._total = torch.zeros(*scores_shape, 1)
        self._sum = torch.zeros(*scores_shape, value_dim)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """scores `[B, Hk, G * Q, K]` with -inf where hidden, values `[B, Hk, K, Dv]`."""
        maximum = torch.maximum(self._maximum, scores.amax(dim=-1, keepdim=True))
        base = maximum.masked_fill(maximum == -torch.inf, 0.0)
        weights = scores.sub_(base).exp_()
        shrink = torch.exp(self._maximum - base)
        self._total = self._total * shrink + weights.sum(dim=-1, keepdim=True)
        self._sum = torch.matmul(weights, values).add_(self._sum.mul_(shrink))
        self._maximum = maximum

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output `[B, Hk, G * Q, Dv]`, 0 where no key was seen, and lse `[B, Hk, G * Q, 1]`."""
        lse = self._maximum + self._total.log()
        return self._sum / self._total.masked_fill(self._total == 0.0, 1.0), lse


class CpuAttention:
    """Attention of one step on the CPU, any dtype, prefill and decode rows mixed."""

    def __init__(self, indptrs: PagedIndptrs, params: AttentionParams) -> None:
        self._params = params
        tiles = _cut(indptrs, params)
        page_ids = indptrs.paged_kv_indices.numpy().astype(np.int64)
        self._groups = [
            _group(tiles, members, page_ids, params) for members in _alike(tiles, params)
        ]

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult:
        """query `[T, Hq, D]`, kv_cache one layer of the pool."""
        num_tokens, num_heads, _ = query.shape
        output = query.new_zeros(num_tokens, num_heads, self._params.value_dim)
        lse = torch.full((num_tokens, num_heads), -torch.inf)
        for group in self._groups:
            tokens = group.tokens.flatten()
            group_output, group_lse = self._attend(group, query[group.tokens].float(), kv_cache)
            output[tokens] = group_output.to(query.dtype)
            lse[tokens] = group_lse
        return AttentionResult(output, lse)

    def _attend(self, group: _Group, query: Tensor, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        params = self._params
        num_tiles, num_queries, num_heads, head_dim = query.shape
        kv_heads, queries_per_key = params.num_kv_heads, num_heads // params.num_kv_heads
        by_kv_head = query.view(num_tiles, num_queries, kv_heads, queries_per_key, head_dim)
        rows = by_kv_head.permute(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim)
        rows = rows * params.score_scale
        softmax = _Softmax(rows.shape[:-1], params.value_dim)
        for chunk in group.chunks:
            keys, values = _read(kv_cache, chunk.slots, params)
            softmax.add(_scores(rows, keys, chunk.bound, params.soft_cap), values)
        output, lse = (
            part.view(num_tiles, kv_heads, queries_per_key, num_queries, -1)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_tiles * num_queries, num_heads, -1)
            for part in softmax.finish()
        )
        return output, lse.squeeze(-1)


def _cut(indptrs: PagedIndptrs, params: AttentionParams) -> _Tiles:
    first = indptrs.qo_indptr.numpy().astype(np.int64)
    kv_lens = row_kv_lens(indptrs, params.page_size).numpy().astype(np.int64)
    num_queries = np.diff(first)
    tiles_per_row = -(-num_queries // QUERY_TILE)
    row = np.repeat(np.arange(len(num_queries)), tiles_per_row)
    in_row = np.arange(len(row)) - np.repeat(tiles_per_row.cumsum() - tiles_per_row, tiles_per_row)
    start = in_row * QUERY_TILE
    queries = np.minimum(QUERY_TILE, num_queries[row] - start)
    limits = kv_lens[row]
    if params.causal:
        limits = np.maximum(0, limits - num_queries[row] + start + queries)
    page = indptrs.paged_kv_indptr.numpy().astype(np.int64)[:-1][row]
    return _Tiles(first[:-1][row] + start, queries, page, limits)


def _alike(tiles: _Tiles, params: AttentionParams) -> Iterator[_Ints]:
    """Tile numbers by group: as many queries each, numbers of keys within a quarter."""
    size = np.ceil(np.log(np.maximum(tiles.limits, 16)) / np.log(1.25)).astype(np.int64)
    order = np.lexsort((size, tiles.queries))
    seeing = order[tiles.limits[order] > 0]
    for (queries, _), members in groupby(
        seeing.tolist(), key=lambda tile: (int(tiles.queries[tile]), int(size[tile]))
    ):
        numbers = np.fromiter(members, dtype=np.int64)
        width = max(params.num_qo_heads * queries, params.num_kv_heads * params.head_dim)
        most = max(1, MAX_ELEMENTS // (width * KEY_CHUNK))
        yield from np.split(numbers, range(most, len(numbers), most))


def _group(tiles: _Tiles, members: _Ints, page_ids: _Ints, params: AttentionParams) -> _Group:
    places = np.arange(tiles.queries[members[0]])
    last = tiles.limits[members][:, None]
    limits = last - (places[-1] - places if params.causal else 0 * places)
    first_page = tiles.page[members][:, None]
    chunks = []
    for start in range(0, int(last.max()), KEY_CHUNK):
        keys = np.arange(start, min(start + KEY_CHUNK, int(last.max())))
        read = np.minimum(keys, last - 1)
        pages = page_ids[first_page + read // params.page_size]
        sides = 1 if params.is_latent else 2
        slots = pages * (sides * params.page_size) + read % params.page_size
        chunks.append(_Chunk(torch.from_numpy(slots), _bound(keys, limits)))
    tokens = tiles.token[members][:, None] + places
    return _Group(torch.from_numpy(tokens), chunks)


def _bound(keys: _Ints, limits: _Ints) -> Tensor | None:
    if keys[-1] < limits.min():
        return None
    bound = np.where(keys < limits[..., None], np.float32(np.inf), np.float32(-np.inf))
    return torch.from_numpy(bound).unsqueeze(1)


def _read(kv_cache: Tensor, slots: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Keys `[B, Hk, K, D]` and values `[B, Hk, K, Dv]` of the slots, float32."""
    rows = kv_cache.view(-1, params.head_dim)
    shape = (slots.shape[0], params.num_kv_heads, slots.shape[1], params.head_dim)
    heads = torch.arange(params.num_kv_heads)[:, None]
    at = (slots.unsqueeze(1) * params.num_kv_heads + heads).flatten()
    keys = rows.index_select(0, at).view(shape).float()
    if params.is_latent:
        return keys, keys[..., : params.value_dim]
    at += params.page_size * params.num_kv_heads
    return keys, rows.index_select(0, at).view(shape).float()


def _scores(rows: Tensor, keys: Tensor, bound: Tensor | None, soft_cap: float | None) -> Tensor:
    scores = torch.matmul(rows, keys.transpose(-1, -2))
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if bound is not None:
        by_query = scores.view(scores.shape[0], -1, *bound.shape[-2:])
        torch.minimum(by_query, bound, out=by_query)
    return scores
