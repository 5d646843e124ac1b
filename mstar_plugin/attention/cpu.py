"""Paged attention on the CPU: tiles of queries of equal shape are batched, keys are visited in
chunks.

A tile is up to `QUERY_TILE` consecutive queries of one row with the keys the last of them sees.
Tiles with as many queries and about as many pages form a group; a group is computed together.
Scores are float32 and never exist for more than one chunk of keys.

Letters: `B` tiles of a group, `Q` queries of a tile, `P` pages of its longest tile, `G` query heads
per KV head, `K` keys of a chunk; the others as in `call.py`.
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
MAX_ELEMENTS = 1 << 22

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """All tiles of a step, `[tiles]` each: first query token, queries, first page, pages, keys.

    `limits` counts the keys the last query sees; an earlier one sees `step` fewer per place.
    """

    token: _Ints
    queries: _Ints
    page: _Ints
    num_pages: _Ints
    limits: _Ints


@dataclass(frozen=True, slots=True)
class _Group:
    """`tokens` `[B, Q]`, `pages` `[B, P]`, `limits` `[B, Q]`: keys below its limit a query sees."""

    tokens: Tensor
    pages: Tensor
    limits: Tensor
    shortest: int
    tightest: int


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
        members = _grouped(tiles, params)
        self._groups = [_gather_indices(tiles, group, page_ids, params) for group in members]
        self._chunk_pages = max(1, KEY_CHUNK // params.page_size)

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
        for first_page in range(0, group.pages.shape[1], self._chunk_pages):
            pages = group.pages[:, first_page : first_page + self._chunk_pages]
            keys, values = _read(kv_cache, pages, params)
            scores = self._scores(rows, keys)
            _hide(scores, values, group, first_page * params.page_size)
            softmax.add(scores, values)
        output, lse = (
            part.view(num_tiles, kv_heads, queries_per_key, num_queries, -1)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_tiles * num_queries, num_heads, -1)
            for part in softmax.finish()
        )
        return output, lse.squeeze(-1)

    def _scores(self, rows: Tensor, keys: Tensor) -> Tensor:
        scores = torch.matmul(rows, keys.transpose(-1, -2))
        cap = self._params.soft_cap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


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
        limits = limits - num_queries[row] + start + queries
    num_pages = np.maximum(0, -(-limits // params.page_size))
    page = indptrs.paged_kv_indptr.numpy().astype(np.int64)[:-1][row]
    return _Tiles(first[:-1][row] + start, queries, page, num_pages, limits)


def _grouped(tiles: _Tiles, params: AttentionParams) -> Iterator[_Ints]:
    """Tile numbers by group: as many queries each, page counts within a quarter of each other."""
    order = np.lexsort((tiles.num_pages, tiles.queries))
    steps = np.ceil(np.log(np.maximum(tiles.num_pages, 1)) / np.log(1.25)).astype(np.int64)
    shape = np.where(tiles.num_pages == 0, -1, steps)
    for (queries, _), members in groupby(
        order.tolist(), key=lambda tile: (int(tiles.queries[tile]), int(shape[tile]))
    ):
        numbers = np.fromiter(members, dtype=np.int64)
        width = max(params.num_qo_heads * queries, params.num_kv_heads * params.head_dim)
        most = max(1, MAX_ELEMENTS // (width * max(KEY_CHUNK, params.page_size)))
        yield from np.split(numbers, range(most, len(numbers), most))


def _gather_indices(
    tiles: _Tiles, members: _Ints, page_ids: _Ints, params: AttentionParams
) -> _Group:
    queries, num_pages = int(tiles.queries[members[0]]), tiles.num_pages[members]
    columns = np.arange(num_pages.max())
    at = tiles.page[members][:, None] + np.minimum(columns, num_pages[:, None] - 1)
    last = tiles.limits[members]
    places = np.arange(queries)
    limits = np.repeat(last[:, None], queries, axis=1)
    if params.causal:
        limits = limits - (queries - 1 - places)
    return _Group(
        tokens=torch.from_numpy(tiles.token[members][:, None] + places),
        pages=torch.from_numpy(page_ids[at]),
        limits=torch.from_numpy(limits),
        shortest=int(last.min()),
        tightest=int(limits.min()),
    )


def _read(kv_cache: Tensor, pages: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Keys `[B, Hk, K, D]` and values `[B, Hk, K, Dv]` of whole pages, float32."""
    if params.is_latent:
        latent = kv_cache[pages].flatten(1, 2).unsqueeze(1).float()
        return latent, latent[..., : params.value_dim]
    keys, values = (kv_cache[pages, side].flatten(1, 2).transpose(1, 2).float() for side in (0, 1))
    return keys, values


def _hide(scores: Tensor, values: Tensor, group: _Group, first_key: int) -> None:
    """Overwrite what must not count: scores by -inf, values that may be unwritten by 0."""
    num_keys = scores.shape[-1]
    if first_key + num_keys <= group.tightest:
        return
    keys = torch.arange(first_key, first_key + num_keys)
    num_tiles, num_queries = group.limits.shape
    hidden = keys >= group.limits.unsqueeze(-1)
    by_query = scores.view(num_tiles, -1, num_queries, num_keys)
    by_query.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    if first_key + num_keys > group.shortest:
        unwritten = hidden[:, -1]
        values.masked_fill_(unwritten[:, None, :, None], 0.0)
