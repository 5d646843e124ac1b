"""FlashAttention over transformed batches equals dense attention under the rule's mask, in graphs
too; what was released is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA card", allow_module_level=True)

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_varlen_func,
    get_flash_attn_version,
)

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import (
    protected_pages,
    released_pages,
    visible_positions,
)
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_limits import DeviceBatchLimits
from mstar_vllm.device_rows import Pages
from mstar_vllm.device_visibility import BatchShape, DeviceVisibility

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
MAX_LEN = 2048
MAX_REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    policy: RetentionPolicy
    pages: Pages
    heads: tuple[int, int]
    head_dim: int = 64
    drafts: int = 0

    def visibility(self) -> DeviceVisibility:
        spec = RetentionSpec(
            block_size=self.pages.block_tokens,
            num_kv_heads=self.heads[1],
            head_size=self.head_dim,
            dtype=torch.bfloat16,
            context_budget=self.policy.context_budget,
            protected_prefix=self.policy.protected_prefix,
            release_tokens=self.pages.page_tokens,
        )
        shape = BatchShape(
            pages=self.pages,
            max_requests=MAX_REQUESTS,
            max_model_len=MAX_LEN,
            drafts=self.drafts,
            plans_on_host=False,
        )
        return DeviceVisibility(shape, DeviceBatchLimits(spec, MAX_REQUESTS, DEVICE), DEVICE)


class Cache:
    """Random keys and values of `MAX_REQUESTS` streams in permuted blocks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        block = case.pages.block_tokens
        self.width = MAX_LEN // block
        count = MAX_REQUESTS * self.width
        shape = (count + 1, block, case.heads[1], case.head_dim)
        self.keys = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
        self.values = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
        order = torch.randperm(count, device=DEVICE).to(torch.int32) + 1
        self.tables = order.view(MAX_REQUESTS, self.width).contiguous()

    def stream(self, what: torch.Tensor, request: int, length: int) -> torch.Tensor:
        """`[length, heads, head_dim]` float32 of one request's keys or values."""
        blocks = what[self.tables[request].long()]
        return blocks.reshape(-1, *blocks.shape[2:])[:length].float()

    def poison(self, request: int, num_stored: int) -> None:
        """Make NaN what is released once `num_stored` tokens are stored."""
        policy, page = self.case.policy, self.case.pages.page_tokens
        budget, prefix = policy.context_budget, policy.protected_prefix
        per_page = page // self.case.pages.block_tokens
        first = protected_pages(prefix, page)
        last = first + released_pages(num_stored, budget, prefix, page)
        gone = self.tables[request, first * per_page : last * per_page].long()
        self.keys[gone] = torch.nan
        self.values[gone] = torch.nan


def batch_of(
    cache: Cache, query_lens: list[int], seq_lens: list[int], padding: int = 0
) -> CommonAttentionMetadata:
    query_lens, seq_lens = query_lens + [0] * padding, seq_lens + [0] * padding
    starts = torch.tensor(np.append(0, np.cumsum(query_lens)), dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=cache.tables[: len(seq_lens)],
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=DEVICE),
    )


def attend(
    cache: Cache, queries: torch.Tensor, seen: CommonAttentionMetadata, out: torch.Tensor
) -> None:
    flash_attn_varlen_func(
        q=queries,
        k=cache.keys,
        v=cache.values,
        out=out,
        cu_seqlens_q=seen.query_start_loc,
        max_seqlen_q=seen.max_query_len,
        seqused_k=seen.seq_lens,
        max_seqlen_k=seen.max_seq_len,
        softmax_scale=queries.shape[-1] ** -0.5,
        causal=True,
        block_table=seen.block_table_tensor,
        fa_version=get_flash_attn_version(),
        num_splits=8,
    )


def dense(
    cache: Cache, queries: torch.Tensor, query_lens: list[int], seq_lens: list[int]
) -> torch.Tensor:
    """What the rule lets each query see, attended to in float32."""
    policy, page = cache.case.policy, cache.case.pages.page_tokens
    group = cache.case.heads[0] // cache.case.heads[1]
    rows = []
    start = 0
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        keys = cache.stream(cache.keys, request, length).repeat_interleave(group, 1)
        values = cache.stream(cache.values, request, length).repeat_interleave(group, 1)
        for token in range(query):
            position = length - query + token
            spans = visible_positions(
                position, policy.context_budget, policy.protected_prefix, page
            )
            index = torch.tensor([p for span in spans for p in span], device=DEVICE)
            scores = torch.einsum("hd,khd->hk", queries[start + token].float(), keys[index])
            weights = (scores * queries.shape[-1] ** -0.5).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values[index]))
        start += query
    return torch.stack(rows)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


POLICY = RetentionPolicy(200, 20)
CASES = [
    Case(policy=POLICY, pages=Pages(page_tokens=16, block_tokens=16), heads=(9, 3)),
    Case(policy=POLICY, pages=Pages(page_tokens=64, block_tokens=64), heads=(8, 8)),
    Case(
        policy=POLICY, pages=Pages(page_tokens=128, block_tokens=128), heads=(32, 8), head_dim=128
    ),
    Case(policy=POLICY, pages=Pages(page_tokens=128, block_tokens=64), heads=(5, 1), head_dim=96),
    Case(
        policy=RetentionPolicy(64, 0), pages=Pages(page_tokens=32, block_tokens=16), heads=(14, 2)
    ),
]
MIXES = [
    ([1, 1, 1], [30, 900, 2047]),
    ([1, 300, 77], [1000, 1300, 77]),
    ([512], [2048]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mix", MIXES, ids=["decode", "mixed", "chunk"])
def test_attention_is_the_masked_reference(case: Case, mix: Any) -> None:
    query_lens, seq_lens = mix
    cache = Cache(case)
    queries = torch.randn(sum(query_lens), case.heads[0], case.head_dim, device=DEVICE)
    queries = queries.to(torch.bfloat16)
    expected = dense(cache, queries, query_lens, seq_lens)
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        cache.poison(request, length - query)
    out = torch.full_like(queries, torch.nan)
    attend(cache, queries, case.visibility().visible(batch_of(cache, query_lens, seq_lens)), out)
    assert relative(out, expected) < 5e-3


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_captured_graph_follows_lengths_and_pages(case: Case, drafts: int) -> None:
    case = Case(
        policy=case.policy,
        pages=case.pages,
        heads=case.heads,
        head_dim=case.head_dim,
        drafts=drafts,
    )
    query, slots = 1 + drafts, 6
    visibility, cache = case.visibility(), Cache(case)
    queries = torch.zeros(slots * query, case.heads[0], case.head_dim, device=DEVICE)
    queries, out = queries.to(torch.bfloat16), queries.to(torch.bfloat16)
    captured = visibility.visible(batch_of(cache, [query] * slots, [MAX_LEN] * slots))
    attend(cache, queries, captured, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(cache, queries, captured, out)
    for base in (7, 250, 1111):
        fresh = Cache(case)
        cache.keys.copy_(fresh.keys), cache.values.copy_(fresh.values)
        cache.tables.copy_(fresh.tables)
        seq_lens = [base + query + 37 * request for request in range(4)]
        queries.copy_(torch.randn_like(queries))
        expected = dense(cache, queries, [query] * 4, seq_lens)
        for request, length in enumerate(seq_lens):
            cache.poison(request, length - query)
        visibility.visible(batch_of(cache, [query] * 4, seq_lens, padding=slots - 4))
        out.fill_(torch.nan)
        graph.replay()
        assert relative(out[: 4 * query], expected) < 5e-3
