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
from rotation import turned

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.model_kv import Rotary
from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm import device_head, device_head_kernel, rows
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_head import Attended, ProtectedAttention
from mstar_vllm.device_limits import DeviceBatchLimits
from mstar_vllm.device_rows import HeadRows, Pages
from mstar_vllm.device_visibility import (
    BatchShape,
    DeviceVisibility,
    RollingBatch,
)
from mstar_vllm.positions import ROLLING, RollingPolicy
from mstar_vllm.visibility import RowLimits, split_rows

pytestmark = [pytest.mark.vllm, *RUNS_KERNELS]
MAX_REQUESTS = 6
# Tensor cores round float32.
DTYPE, TOLERANCE = (torch.float16, 2e-2) if RUNS_KERNELS else (torch.float32, 1e-4)
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
        turned_blocks=spec.turned_blocks(),
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
@settings(max_examples=25 if RUNS_KERNELS else 10, deadline=None)
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


SCALE = 0.2


def dense(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, heads, size]` over `[N, heads, size]`: outputs and log-sum-exps `[heads, T]`."""
    scores = torch.einsum("thd,nhd->htn", queries, keys) * SCALE
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("scheme", [*SCHEMES, "none"])
@pytest.mark.parametrize(
    ("group", "size", "cap", "processors"),
    [(1, 64, 0.0, 1), (4, 64, 5.0, 100), (3, 80, 0.0, 64), (7, 64, 0.0, 1)],
)
def test_protected_keys_join_the_rest_of_a_row(
    scheme: str, group: int, size: int, cap: float, processors: int
) -> None:
    """A turned query meets a key as the query meets a turned key, in one softmax with the rest."""
    rotary = SCHEMES.get(scheme)
    counts, turns, lens = [2, 1, 41, 0], [16, 0, 2_000_000, 0], [48, 0, 550, 0]
    block, kv_heads = 16, 2
    heads, total = kv_heads * group, sum(counts)
    made = torch.Generator().manual_seed(7)
    queries = torch.randn(total, heads, size, generator=made)
    cache = torch.full((2, 160, block, kv_heads, size), float("nan"))
    tables = torch.randperm(160, generator=made).view(4, 40).to(torch.int32)
    outputs, log_sums, expected = [], [], []
    begin = 0
    for row, (count, turn, length) in enumerate(zip(counts, turns, lens, strict=True)):
        query = queries[begin : begin + count]
        begin += count
        near_keys, near_values = torch.randn(2, 5, heads, size, generator=made)
        seen, lse = dense(query, near_keys, near_values, cap)
        outputs.append(seen)
        log_sums.append(lse)
        blocks = tables[row, : -(-length // block)].long()
        cache[:, blocks] = torch.randn(2, len(blocks), block, kv_heads, size, generator=made)
        keys, values = cache[:, blocks].flatten(1, 2)[:, :length].repeat_interleave(group, 2)
        if rotary is not None and length:
            angles = torch.from_numpy(turn * inverse_frequencies(rotary))
            keys = turned(keys, rotary, angles).float()
        both = dense(query, torch.cat([near_keys, keys]), torch.cat([near_values, values]), cap)
        expected.append(both[0])
        if length % block:
            cache[:, blocks[-1], length % block :] = float("nan")
    attended = Attended(
        output=torch.cat(outputs).to(DEVICE, DTYPE), log_sums=torch.cat(log_sums, 1).to(DEVICE)
    )
    stored = cache.to(DEVICE, DTYPE)
    ProtectedAttention(rotary, DEVICE, SCALE, cap, processors).add(
        attended,
        queries.to(DEVICE, DTYPE),
        stored[0],
        stored[1],
        torch.tensor(np.append(0, np.cumsum(counts)), dtype=torch.int32, device=DEVICE),
        HeadRows(
            *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (tables.tolist(), lens)),
            turns=torch.tensor(turns, dtype=torch.int32, device=DEVICE),
        ),
        most_queries=41,
    )
    result = attended.output.float().cpu()
    assert torch.allclose(result, torch.cat(expected), atol=TOLERANCE)
    assert not torch.allclose(result, torch.cat(outputs), atol=0.1)


class Recorder:
    """Launches a kernel and keeps what each launch was compiled for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled_for: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.compiled_for.add(tuple(sorted(constants.items())))
            self._kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.parametrize(("group", "pages"), [(1, 3), (4, 60), (7, 200)])
def test_no_batch_launches_what_the_start_did_not_compile(
    group: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = {}
    for name in ("add_protected", "join_parts"):
        recorders[name] = Recorder(getattr(device_head, name))
        monkeypatch.setattr(device_head, name, recorders[name])
    # A size that no other test has compiled forms for.
    page, heads, size = 16, 2 * group, 96
    cache = torch.zeros(4, page, 2, 2 * size, dtype=DTYPE, device=DEVICE)
    keys, values = cache[..., :size], cache[..., size:]
    protected = ProtectedAttention(None, DEVICE, SCALE, 0.0, 20)
    protected.warm_up(cache, heads, pages, page)
    seen = {name: set(recorder.compiled_for) for name, recorder in recorders.items()}
    compiled = compiled_variants()
    dice = np.random.default_rng(1)
    for _ in range(60):
        rows, most = int(dice.integers(1, 100)), int(dice.integers(1, page + 1))
        tokens = int(dice.integers(1, 2 * rows * most))
        empty = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        queries = torch.zeros(tokens, heads, size, dtype=DTYPE, device=DEVICE)
        log_sums = torch.zeros(heads, tokens, device=DEVICE)
        tables = torch.zeros(rows, pages, dtype=torch.int32, device=DEVICE)
        head = HeadRows(tables=tables, seq_lens=empty[:rows], turns=empty[:rows])
        attended = Attended(output=queries, log_sums=log_sums)
        protected.add(attended, queries, keys, values, empty, head, most)
    assert {name: recorder.compiled_for for name, recorder in recorders.items()} == seen
    assert compiled_variants() == compiled


def compiled_variants() -> list[int]:
    """How many forms of each kernel the card has; nothing in the interpreter."""
    if not RUNS_KERNELS:
        return []
    kernels: Any = (device_head_kernel.add_protected, device_head_kernel.join_parts)
    return [len(forms[0]) for kernel in kernels for forms in kernel.device_caches.values()]
