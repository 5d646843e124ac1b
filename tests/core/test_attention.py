"""The CPU path and the merge against the reference, and the reference against PyTorch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mstar_plugin.attention import AttentionParams, AttentionPath, attend, plan_attention
from mstar_plugin.attention.call import AttentionResult
from mstar_plugin.attention.merge import attend_context_and_new, merge
from mstar_plugin.kv.config import KVLayout, PagedKVConfig
from mstar_plugin.kv.plan import KVPlanOutput, SequenceView, build_paged_indptrs

PREFILL_AND_DECODE = [
    *[(1, 1), (1, 40), (5, 5), (7, 19), (0, 6), (130, 301), (1, 33), (3, 8)],
    *[(1, 29), (1, 35), (3, 60), (3, 70), (2, 602), (2, 700)],
]


def params(**changes: Any) -> AttentionParams:
    values: dict[str, Any] = {
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 8,
    }
    return AttentionParams(**(values | changes))


def latent(**changes: Any) -> AttentionParams:
    values: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_dim": 24,
        "layout": KVLayout.MLA,
        "kv_lora_rank": 16,
        "scale": 0.2,
    }
    return params(**(values | changes))


class Case:
    """Streams of random content, rows as (queries, tokens); unwritten slots hold `poison`."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        params: AttentionParams,
        poison: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        size = params.page_size
        torch.manual_seed(3)
        page_counts = [-(-tokens // size) for _, tokens in rows]
        free = list(range(1, sum(page_counts) + 2))
        random.Random(5).shuffle(free)
        self.params = params
        self.kv_cache = torch.full((len(free) + 2, *params.page_shape), poison, dtype=dtype)
        self.views: list[SequenceView] = []
        for index, ((queries, tokens), count) in enumerate(zip(rows, page_counts, strict=True)):
            pages = [free.pop() for _ in range(count)]
            self.views.append(SequenceView(f"r{index}", "main", pages, tokens, queries))
            for place in range(tokens):
                self._slots(pages[place // size], place % size).normal_()
        num_tokens = sum(queries for queries, _ in rows)
        self.query = torch.randn(num_tokens, params.num_qo_heads, params.head_dim, dtype=dtype)
        self.indptrs = build_paged_indptrs(self.views, size)

    def _slots(self, page: int, slot: int) -> Tensor:
        page_content = self.kv_cache[page]
        return page_content[slot] if self.params.is_latent else page_content[:, slot]

    def by(self, path: str) -> AttentionResult:
        return attend(self.query, self.kv_cache, self.indptrs, self.params, path)


def assert_same(actual: AttentionResult, expected: AttentionResult, atol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.output, expected.output, atol=atol, rtol=1e-5)
    torch.testing.assert_close(actual.lse, expected.lse, atol=2e-5, rtol=1e-5)


GEOMETRIES = [
    params(),
    params(causal=False),
    params(num_qo_heads=2),
    params(num_qo_heads=7, num_kv_heads=1),
    params(num_qo_heads=14, num_kv_heads=2, head_dim=8),
    params(scale=0.7),
    params(soft_cap=2.0),
    params(page_size=1),
    params(page_size=5, head_dim=20),
    params(page_size=1024),
    latent(),
    latent(causal=False, soft_cap=1.5),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_cpu_path_gives_what_the_reference_gives(geometry: AttentionParams) -> None:
    case = Case(PREFILL_AND_DECODE, geometry)
    assert_same(case.by("cpu"), case.by("reference"))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_unwritten_slots_hold_changes_nothing(
    path: str, geometry: AttentionParams, poison: float
) -> None:
    clean = Case(PREFILL_AND_DECODE, geometry).by(path)
    poisoned = Case(PREFILL_AND_DECODE, geometry, poison).by(path)
    assert torch.equal(poisoned.output, clean.output)
    assert torch.equal(poisoned.lse, clean.lse)


@given(
    rows=st.lists(st.tuples(st.integers(0, 140), st.integers(0, 300)), min_size=1, max_size=12),
    causal=st.booleans(),
    page_size=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=25, deadline=None)
def test_any_batch_agrees_with_the_reference(
    rows: list[tuple[int, int]], causal: bool, page_size: int
) -> None:
    small = params(num_qo_heads=2, num_kv_heads=1, head_dim=4, causal=causal, page_size=page_size)
    case = Case(rows, small, poison=float("nan"))
    assert_same(case.by("cpu"), case.by("reference"))


@pytest.mark.parametrize("num_rows", [1, 60])
def test_rows_do_not_depend_on_their_neighbours(num_rows: int) -> None:
    case = Case([(1, 700 + index % 9) for index in range(num_rows)], params())
    together = case.by("cpu")
    alone = build_paged_indptrs(case.views[-1:], 8)
    last = attend(case.query[-1:], case.kv_cache, alone, params(), "cpu")
    torch.testing.assert_close(together.output[-1:], last.output, atol=1e-6, rtol=1e-6)


def test_keys_beyond_one_chunk_are_rescaled() -> None:
    case = Case([(1, 5000), (200, 2100)], params(scale=3.0))
    assert_same(case.by("cpu"), case.by("reference"), atol=1e-4)


def test_low_precision_is_as_good_as_its_inputs() -> None:
    case = Case(PREFILL_AND_DECODE, params(), dtype=torch.bfloat16)
    actual, expected = case.by("cpu"), case.by("reference")
    assert actual.output.dtype == torch.bfloat16
    torch.testing.assert_close(actual.output, expected.output, atol=4e-3, rtol=1.6e-2)
    assert actual.lse.dtype == torch.float32


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_pytorchs_attention(causal: bool) -> None:
    case = Case([(5, 11)], params(causal=causal))
    (view,) = case.views
    gathered = case.kv_cache[torch.tensor(view.page_idxs)]
    keys, values = (
        gathered[:, side].flatten(0, 1)[:11].transpose(0, 1).repeat_interleave(3, dim=0)
        for side in (0, 1)
    )
    mask = torch.ones(5, 11, dtype=torch.bool).tril(6 if causal else 11)
    expected = F.scaled_dot_product_attention(case.query.transpose(0, 1), keys, values, mask)
    actual = case.by("reference").output
    torch.testing.assert_close(actual, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", ["reference", "cpu"])
def test_a_query_that_sees_nothing_gives_zero(path: str) -> None:
    result = Case([(2, 0), (4, 2), (1, 3)], params()).by(path)
    assert not result.output[:4].any() and torch.isinf(result.lse[:4]).all()
    assert result.output[4:].abs().sum(dim=-1).all() and torch.isfinite(result.lse[4:]).all()


@pytest.mark.parametrize("path", ["reference", "cpu"])
def test_an_empty_step_has_an_empty_result(path: str) -> None:
    result = Case([], params()).by(path)
    assert result.output.shape == (0, 6, 16) and result.lse.shape == (0, 6)


def test_one_plan_serves_every_layer() -> None:
    case = Case(PREFILL_AND_DECODE, params())
    planned = plan_attention(KVPlanOutput(case.indptrs, case.views), params(), AttentionPath.CPU)
    other_layer = case.kv_cache.flip(1)
    assert_same(planned.run(case.query, case.kv_cache), case.by("reference"))
    expected = attend(case.query, other_layer, case.indptrs, params(), "reference")
    assert_same(planned.run(case.query, other_layer), expected)


def test_row_lengths_are_derived_where_a_plan_has_none() -> None:
    case = Case([(1, 9), (2, 16), (1, 0)], params())
    without = case.indptrs._replace(kv_lens=None)
    result = attend(case.query, case.kv_cache, without, params(), "cpu")
    assert_same(result, case.by("reference"))


@pytest.mark.parametrize("path", ["flash", "", "CPU"])
def test_an_unknown_path_is_answered_with_the_known_ones(path: str) -> None:
    with pytest.raises(ValueError, match=f"reference, cpu, flashinfer, got '{path}'"):
        Case([(1, 3)], params()).by(path)


def test_a_path_that_cannot_serve_a_device_refuses() -> None:
    case = Case([(1, 3)], params())
    with pytest.raises(ValueError, match="flashinfer needs tensors on a CUDA device, got cpu"):
        case.by("flashinfer")
    with pytest.raises(ValueError, match="cpu needs tensors on the CPU, got meta"):
        plan_attention(case.indptrs, params(), "cpu", "meta")


@pytest.mark.parametrize(
    ("query", "kv_cache", "message"),
    [
        (torch.zeros(2, 6, 16), None, r"query must have shape \(1, 6, 16\), got \(2, 6, 16\)"),
        (None, torch.zeros(9, 2, 8, 3, 16), r"\(pages, 2, 8, 2, 16\), got \(9, 2, 8, 3, 16\)"),
        (torch.zeros(1, 6, 16, dtype=torch.int32), None, "floating point, got torch.int32"),
        (None, torch.zeros(9, 2, 8, 2, 16, device="meta"), "one device, got cpu and meta"),
        (None, torch.zeros(9, 2, 8, 2, 32)[..., :16], "contiguous, got strides"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    query: Tensor | None, kv_cache: Tensor | None, message: str
) -> None:
    case = Case([(1, 3)], params())
    with pytest.raises(ValueError, match=message):
        attend(
            case.query if query is None else query,
            case.kv_cache if kv_cache is None else kv_cache,
            case.indptrs,
            params(),
            "cpu",
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_qo_heads": 7}, "multiple of num_kv_heads=2, got 7"),
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0"),
        ({"layout": KVLayout.MLA, "num_kv_heads": 1}, "needs scale and kv_lora_rank"),
    ],
)
def test_impossible_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(**changes)


def mla_config(**changes: Any) -> PagedKVConfig:
    values: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 16,
        "head_dim": 1,
        "max_seq_len": 64,
        "layout": KVLayout.MLA,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
    }
    return PagedKVConfig(**(values | changes))


def test_parameters_follow_a_sharded_config() -> None:
    config = PagedKVConfig(
        num_layers=1, num_kv_heads=8, head_dim=4, num_qo_heads=32, max_seq_len=64, page_size=16
    )
    config.shard(4)
    derived = AttentionParams.from_config(config, causal=False, soft_cap=30.0)
    assert (derived.num_qo_heads, derived.num_kv_heads, derived.page_size) == (8, 2, 16)
    assert (derived.causal, derived.soft_cap, derived.score_scale) == (False, 30.0, 0.5)
    from_mla = AttentionParams.from_config(mla_config(num_qo_heads=6), scale=0.2)
    assert from_mla == latent(page_size=128)


def test_mla_refuses_a_guess_at_the_query_heads() -> None:
    with pytest.raises(ValueError, match="needs num_qo_heads given"):
        AttentionParams.from_config(mla_config(), scale=0.2)


def test_merged_halves_are_the_whole() -> None:
    whole = Case([(3, 40), (1, 24)], params(causal=False))
    halves = []
    for cut in (slice(0, 2), slice(2, None)):
        views = [
            view._replace(page_idxs=view.page_idxs[cut], length=len(view.page_idxs[cut]) * 8)
            for view in whole.views
        ]
        part = build_paged_indptrs(views, 8)
        halves.append(attend(whole.query, whole.kv_cache, part, whole.params, "cpu"))
    assert_same(merge(*halves), whole.by("reference"))
    assert_same(merge(halves[1], halves[0]), whole.by("reference"))


def test_merging_with_nothing_changes_nothing() -> None:
    some = Case([(3, 40)], params()).by("cpu")
    nothing = Case([(3, 0)], params()).by("cpu")
    assert_same(merge(some, nothing), some)
    assert_same(merge(nothing, some), some)
    assert_same(merge(nothing, nothing), nothing)


def test_equal_parts_merge_to_their_mean() -> None:
    ones = AttentionResult(torch.ones(1, 1, 2), torch.zeros(1, 1))
    threes = AttentionResult(torch.full((1, 1, 2), 3.0), torch.zeros(1, 1))
    merged = merge(ones, threes)
    assert torch.allclose(merged.output, torch.full((1, 1, 2), 2.0))
    assert torch.allclose(merged.lse, torch.tensor([[2.0]]).log())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("path", ["reference", "cpu"])
def test_context_and_new_tokens_are_as_if_all_were_stored(path: str, causal: bool) -> None:
    case = Case([(3, 10), (4, 4), (2, 18), (5, 29)], params(causal=causal), poison=float("nan"))
    stored = case.kv_cache.clone()
    new = []
    for view in case.views:
        for place in range(view.length - view.to_compute, view.length):
            page, slot = view.page_idxs[place // 8], place % 8
            new.append(stored[page, :, slot].clone())
            case.kv_cache[page, :, slot] = float("nan")
    keys, values = torch.stack(new).unbind(dim=1)
    result = attend_context_and_new(
        case.query, keys, values, case.kv_cache, case.views, case.params, path
    )
    expected = attend(case.query, stored, case.indptrs, case.params, "reference")
    assert_same(result, expected)


def test_latent_rows_have_no_new_values() -> None:
    case = Case([(1, 3)], latent())
    with pytest.raises(NotImplementedError, match="layout NHD"):
        attend_context_and_new(
            case.query, case.query, case.query, case.kv_cache, case.views, case.params, "cpu"
        )


def test_a_group_of_rows_is_not_larger_than_memory_allows() -> None:
    wide = params(num_qo_heads=64, num_kv_heads=64, head_dim=128)
    case = Case([(1, 9)] * 3, replace(wide, page_size=16))
    assert_same(case.by("cpu"), case.by("reference"))
