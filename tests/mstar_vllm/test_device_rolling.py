"""On device, rows with rolling positions see their protected pages apart, with turned queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM")

from device_batches import DEVICE, MAX_LEN, RUNS_KERNELS, batch_on

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.model_kv import Rotary
from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm import rows
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.cpu_key_turn import turned_keys
from mstar_vllm.device_limits import DeviceBatchLimits
from mstar_vllm.device_rows import Pages
from mstar_vllm.device_turn import QueryTurn
from mstar_vllm.device_visibility import (
    BatchShape,
    DeviceVisibility,
    RollingBatch,
)
from mstar_vllm.positions import ROLLING, RollingPolicy
from mstar_vllm.visibility import RowLimits, split_rows

pytestmark = [pytest.mark.vllm, *RUNS_KERNELS]
MAX_REQUESTS = 6
SERVER = RollingPolicy(60, 20)
OWN = st.sampled_from(
    [
        None,
        RetentionPolicy(60, 20),
        RetentionPolicy(33, 0),
        RollingPolicy(30, 20),
        RollingPolicy(60, 3),
    ]
)


def visibility(pages: Pages, drafts: int = 0) -> DeviceVisibility:
    spec = RetentionSpec(
        block_size=pages.block_tokens,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        context_budget=SERVER.context_budget,
        protected_prefix=SERVER.protected_prefix,
        positions=ROLLING,
        release_tokens=pages.page_tokens,
    )
    shape = BatchShape(
        pages=pages,
        max_requests=MAX_REQUESTS,
        max_model_len=MAX_LEN,
        drafts=drafts,
        plans_on_host=False,
        most_turned_pages=spec.turned_pages(SERVER),
    )
    return DeviceVisibility(shape, DeviceBatchLimits(spec, MAX_REQUESTS, DEVICE), DEVICE)


Row = tuple[int, int, list[int], int, list[int]]


def rows_of(seen: Any, block: int) -> list[Row]:
    """Each row that holds tokens: query length, blocks seen in place and how many tokens of them,
    blocks seen apart, the turn."""
    starts = seen.query_start_loc.tolist()
    found: list[Row] = []
    for row in range(seen.num_reqs):
        query, near = starts[row + 1] - starts[row], int(seen.seq_lens[row])
        if not query:
            continue
        apart = int(seen.head.seq_lens[row]) // block
        assert int(seen.head.seq_lens[row]) % block == 0
        found.append(
            (
                query,
                near,
                seen.block_table_tensor[row, : -(-near // block)].tolist(),
                int(seen.head.turns[row]),
                seen.head.tables[row, :apart].tolist(),
            )
        )
    return found


def expected_rows(
    query_lens: list[int],
    seq_lens: list[int],
    own: list[RetentionPolicy | None],
    pages: Pages,
) -> list[Row]:
    """By the rule, one page after the other."""
    policies = [policy or SERVER for policy in own]
    limits = RowLimits.of_policies(policies, pages.page_tokens)
    split = split_rows(np.array(query_lens), np.array(seq_lens), limits)
    each = pages.page_tokens // pages.block_tokens
    found: list[Row] = []
    for row, request in enumerate(split.request):
        head, released = int(limits.head_pages[request]), int(split.released[row])
        blocks = [1000 * int(request) + i for i in range(-(-MAX_LEN // pages.block_tokens))]
        visible = -(-int(split.seq_lens[row]) // pages.block_tokens)
        seen = blocks[: head * each] + blocks[(head + released) * each :]
        apart = head if isinstance(policies[request], RollingPolicy) and released else 0
        found.append(
            (
                int(split.query_lens[row]),
                int(split.seq_lens[row]) - apart * pages.page_tokens,
                seen[apart * each : visible],
                released * pages.page_tokens if apart else 0,
                seen[: apart * each],
            )
        )
    return found


@pytest.mark.parametrize("max_query", [1, 4, 150], ids=["decode", "drafts", "chunks"])
@given(data=st.data(), block=st.sampled_from([4, 8]), multiple=st.sampled_from([1, 2]))
@settings(max_examples=25, deadline=None)
def test_rows_see_protected_pages_apart(
    data: st.DataObject, max_query: int, block: int, multiple: int
) -> None:
    pages = Pages(page_tokens=block * multiple, block_tokens=block)
    lengths = data.draw(
        st.lists(
            st.tuples(st.integers(1, max_query), st.integers(0, MAX_LEN - max_query), OWN),
            min_size=1,
            max_size=MAX_REQUESTS - 1,
        )
    )
    query_lens = [query for query, _, _ in lengths]
    seq_lens = [query + before for query, before, _ in lengths]
    own = [policy for _, _, policy in lengths]
    batch = batch_on(DEVICE, query_lens, seq_lens, block, padding=1)
    rows._published = own
    try:
        seen = visibility(pages, drafts=3 if max_query == 4 else 0).visible(batch)
    finally:
        rows._published = None
    expected = expected_rows(query_lens, seq_lens, own, pages)
    if seen is batch:
        assert all(turn == 0 for _, _, _, turn, _ in expected)
    else:
        assert isinstance(seen, RollingBatch)
        assert rows_of(seen, block) == expected


def test_what_a_graph_reads_never_moves() -> None:
    seen = visibility(Pages(page_tokens=16, block_tokens=16))
    addresses = set()
    for length in (5, 96, 97, 300):
        batch: Any = seen.visible(batch_on(DEVICE, [1] * 4, [length] * 4, 16))
        seen.visible(batch_on(DEVICE, [60], [360], 16))
        head = batch.head
        addresses.add(tuple(part.data_ptr() for part in (head.tables, head.seq_lens, head.turns)))
    assert len(addresses) == 1


SCHEMES = {
    "plain": Rotary(theta=10000.0, rotary_dim=64),
    "interleaved": Rotary(theta=10000.0, rotary_dim=64, interleaved=True),
    "part of the head": Rotary(theta=500000.0, rotary_dim=24),
    "interpolated": Rotary(
        theta=10000.0, rotary_dim=64, scaling="linear", parameters=(("factor", 4.0),)
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_turned_query_meets_a_key_as_a_turned_key_meets_the_query(scheme: str) -> None:
    rotary = SCHEMES[scheme]
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    turns = torch.tensor([16, 0, 2_000_000], dtype=torch.int32)
    queries, keys = torch.randn(2, 6, 2, 64)
    queries = queries.to(DEVICE)
    turned = QueryTurn(rotary, DEVICE).back(queries, starts.to(DEVICE), turns.to(DEVICE))
    of_token = turns.repeat_interleave(starts.diff())
    angles = of_token.double()[:, None] * torch.from_numpy(inverse_frequencies(rotary))
    forward = turned_keys(keys[:, :, None], angles, rotary)[:, :, 0]
    moved = of_token > 0
    seen = (turned.cpu() * keys).sum(-1)[moved]
    assert torch.allclose(seen, (queries.cpu() * forward).sum(-1)[moved], atol=1e-4)
    assert not torch.allclose(seen, (queries.cpu() * keys).sum(-1)[moved], atol=1e-1)


def test_a_layer_without_positions_turns_nothing() -> None:
    queries = torch.randn(2, 1, 8)
    zeros = torch.zeros(3, dtype=torch.int32)
    assert QueryTurn(None, torch.device("cpu")).back(queries, zeros, zeros[:2]) is queries
