"""vLLM's CPU kernels over the transformed batch equal dense attention over what the rule shows.

Letters in shapes: `T` tokens, `H` query heads, `G` KV heads, `D` head size.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import visible_positions
from mstar_vllm.visibility import RowLimits, transform

pytestmark = pytest.mark.vllm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cache:
    """A paged KV pool in the kernels' layout, filled request by request, in permuted blocks."""

    def __init__(self, block: int, heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.block, self.heads, self.head_size, self.dtype = block, heads, head_size, dtype
        self.isa = _get_attn_isa(dtype, block, head_size, "auto")
        self.pool = torch.zeros(200, heads, block, 2 * head_size, dtype=dtype)
        self.order = torch.randperm(199) + 1
        self.used = 0

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        view = self.pool.view(len(self.pool), self.heads, 2 * self.block, self.head_size)
        keys, values = view.chunk(2, dim=2)
        return keys, values

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store one request's `[T, G, D]` keys and values; returns its block ids in order."""
        count = -(-len(keys) // self.block)
        blocks = self.order[self.used : self.used + count]
        self.used += count
        positions = torch.arange(len(keys))
        slots = blocks[positions // self.block] * self.block + positions % self.block
        ops.cpu_attn_reshape_and_cache(
            keys.to(self.dtype), values.to(self.dtype), *self.halves(), slots, self.isa
        )
        return blocks

    def poison(self, blocks: torch.Tensor) -> None:
        self.pool[blocks] = float("nan")


def dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    policy: RetentionPolicy,
    page: int,
) -> torch.Tensor:
    """The last `len(queries)` positions' attention in float64, `[T, H, D]`."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    first = len(keys) - len(queries)
    out = []
    for i, query in enumerate(queries.double()):
        seen = [
            position
            for span in visible_positions(
                first + i, policy.context_budget, policy.protected_prefix, page
            )
            for position in span
        ]
        scores = torch.einsum("hd,khd->hk", query, keys[seen]) * queries.shape[2] ** -0.5
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]))
    return torch.stack(out)


def batch_of(query_lens: list[int], seq_lens: list[int], tables: list[torch.Tensor]) -> Any:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    width = max(len(table) for table in tables)
    table = torch.zeros(len(tables), width, dtype=torch.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )


def attend(cache: Cache, batch: Any, queries: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(queries, dtype=cache.dtype)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch.num_reqs,
        num_heads=queries.shape[1],
        num_kv_heads=cache.heads,
        head_dim=cache.head_size,
        seq_lens=batch.seq_lens,
        dtype=cache.dtype,
        query_start_loc=batch.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=cache.isa,
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=queries.to(cache.dtype),
        key_cache=cache.halves()[0],
        value_cache=cache.halves()[1],
        output=output,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        scale=cache.head_size**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=batch.block_table_tensor,
        softcap=0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 48, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (14, 2, 128), (5, 1, 80)])
def test_released_pages_may_hold_anything(
    dtype: torch.dtype, block: int, heads: int, kv_heads: int, head_size: int
) -> None:
    """Decode rows and chunks in one batch; every page no row of the batch sees is poisoned."""
    policy = RetentionPolicy(3 * block - 5, block // 2)
    limits = RowLimits.of_policy(policy, block)
    cache = Cache(block, kv_heads, head_size, dtype)
    query_lens = [1, 2 * block + 3, 1, 7]
    seq_lens = [7 * block + 1, 8 * block + 2, 5, 6 * block]
    tables, queries, expected = [], [], []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        keys, values = (torch.randn(seq_len, kv_heads, head_size).to(dtype) for _ in range(2))
        query = torch.randn(query_len, heads, head_size).to(dtype)
        blocks = cache.write(keys, values)
        expected.append(dense(query, keys, values, policy, block))
        first = seq_len - query_len
        spans = visible_positions(first, policy.context_budget, policy.protected_prefix, block)
        seen = {position // block for span in spans for position in span}
        unseen = [i for i in range(first // block) if i not in seen]
        cache.poison(blocks[unseen])
        tables.append(blocks)
        queries.append(query)
    batch = transform(batch_of(query_lens, seq_lens, tables), limits, block)
    output = attend(cache, batch, torch.cat(queries))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        output.double(), torch.cat(expected), atol=max(rounding, 5e-6), rtol=rounding
    )
