"""The FlashInfer path against the reference on a CUDA card, and what it refuses anywhere."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_plugin.attention import AttentionParams, AttentionResult, attend
from mstar_plugin.attention.flashinfer import FlashInferPlanner, GraphSize, _blind_queries
from mstar_plugin.attention.merge import attend_context_and_new
from mstar_plugin.kv.config import KVLayout
from mstar_plugin.kv.plan import (
    PagedIndptrs,
    PinnedIndexRing,
    SequenceView,
    build_paged_indptrs,
)

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
needs_card = pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_FLASHINFER),
    reason="needs a CUDA card and the flashinfer package",
)


def params(**changes: Any) -> AttentionParams:
    values: dict[str, Any] = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "page_size": 16,
    }
    return AttentionParams(**(values | changes))


def latent(**changes: Any) -> AttentionParams:
    values: dict[str, Any] = {
        "num_qo_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 576,
        "layout": KVLayout.MLA,
        "kv_lora_rank": 512,
        "scale": 192**-0.5,
    }
    return params(**(values | changes))


DECODE = [(1, 1), (1, 16), (1, 17), (1, 600), (1, 31)]
MIXED = [(1, 40), (7, 19), (130, 301), (16, 16), (1, 2000), (40, 41)]


def make_views(rows: list[tuple[int, int]], page_size: int) -> list[SequenceView]:
    counts = [-(-tokens // page_size) for _, tokens in rows]
    free = random.Random(3).sample(range(1, sum(counts) + 1), sum(counts))
    return [
        SequenceView(f"r{index}", "main", [free.pop() for _ in range(count)], tokens, queries)
        for index, ((queries, tokens), count) in enumerate(zip(rows, counts, strict=True))
    ]


def make_pool(views: list[SequenceView], params: AttentionParams) -> Tensor:
    """One layer on the card, NaN in every slot the views do not hold."""
    torch.manual_seed(1)
    num_pages = sum(len(view.page_idxs) for view in views) + 1
    pool = torch.full((num_pages, *params.page_shape), float("nan"))
    for view in views:
        for index, page in enumerate(view.page_idxs):
            slots = min(params.page_size, view.length - index * params.page_size)
            side = pool[page] if params.is_latent else pool[page].transpose(0, 1)
            side[:slots] = torch.randn_like(side[:slots])
    return pool.to("cuda", torch.bfloat16)


def make_query(indptrs: PagedIndptrs, params: AttentionParams) -> Tensor:
    shape = (int(indptrs.qo_indptr[-1]), params.num_qo_heads, params.head_dim)
    return torch.randn(shape).to("cuda", torch.bfloat16)


def assert_close(actual: AttentionResult, expected: AttentionResult) -> None:
    torch.testing.assert_close(actual.output, expected.output, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(actual.lse, expected.lse, atol=5e-3, rtol=5e-3)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("rows", [DECODE, MIXED])
@pytest.mark.parametrize(
    "geometry",
    [
        params(),
        params(causal=False),
        params(num_qo_heads=2),
        params(num_qo_heads=14),
        params(head_dim=64, page_size=32, scale=0.2),
        params(soft_cap=3.0),
        latent(),
    ],
)
def test_flashinfer_gives_what_the_reference_gives(
    geometry: AttentionParams, rows: list[tuple[int, int]]
) -> None:
    views = make_views(rows, geometry.page_size)
    indptrs = build_paged_indptrs(views, geometry.page_size)
    pool, query = make_pool(views, geometry), make_query(indptrs, geometry)
    actual = attend(query, pool, indptrs, geometry, "flashinfer")
    assert_close(actual, attend(query, pool, indptrs, geometry, "reference"))


@pytest.mark.gpu
@needs_card
def test_a_planner_serves_step_after_step_out_of_a_ring() -> None:
    geometry, ring = params(), PinnedIndexRing()
    planner = FlashInferPlanner(geometry, "cuda", torch.bfloat16)
    for rows in (MIXED, DECODE, [(1, 5)], MIXED[:2], DECODE):
        views = make_views(rows, 16)
        ring.begin_plan()
        indptrs = build_paged_indptrs(views, 16, ring)
        pool, query = make_pool(views, geometry), make_query(indptrs, geometry)
        planner.plan(indptrs)
        expected = attend(query, pool, build_paged_indptrs(views, 16), geometry, "reference")
        assert_close(planner.run(query, pool), expected)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("steps", [[MIXED, MIXED[3:], MIXED[:3]], [DECODE, DECODE[:2], [(1, 900)]]])
def test_a_step_keeps_its_plan_while_the_host_is_ahead(
    steps: list[list[tuple[int, int]]], is_kept: bool
) -> None:
    geometry = params(head_dim=64)
    planner = FlashInferPlanner(geometry, "cuda", torch.bfloat16)
    found, asked = [], []
    for rows in steps:
        views = make_views(rows, 16)
        indptrs = build_paged_indptrs(views, 16)
        asked.append((make_query(indptrs, geometry), make_pool(views, geometry), indptrs))
    planner.plan(asked[0][2])
    planner.run(*asked[0][:2])
    torch.cuda.synchronize()
    for query, pool, indptrs in asked:
        torch.cuda._sleep(40_000_000)
        if not is_kept:
            planner = FlashInferPlanner(geometry, "cuda", torch.bfloat16)
        planner.plan(indptrs)
        found.append(planner.run(query, pool))
    for result, call in zip(found, asked, strict=True):
        assert_close(result, attend(*call, geometry, "reference"))


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("geometry", [params(), params(num_qo_heads=2), latent()])
def test_a_captured_decode_follows_its_plan(geometry: AttentionParams) -> None:
    size = GraphSize(num_rows=5, max_pages=64)
    planner = FlashInferPlanner(geometry, "cuda", torch.bfloat16, size)
    steps = [[(1, n + i) for i in (0, 13, 90, 150, 31)] for n in (9, 10, 16, 40)]
    views = make_views([(1, 200)] * 5, geometry.page_size)
    pool = make_pool(views, geometry)
    query = make_query(build_paged_indptrs(views, 16), geometry)
    planner.plan(indptrs_at(views, steps[0]))
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(warm):
        planner.run(query, pool)
    warm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = planner.run(query, pool)
    for rows in steps:
        indptrs = indptrs_at(views, rows)
        query.normal_()
        planner.plan(indptrs)
        graph.replay()
        assert_close(captured, attend(query, pool, indptrs, geometry, "reference"))


def indptrs_at(views: list[SequenceView], rows: list[tuple[int, int]]) -> PagedIndptrs:
    """The same streams at other lengths."""
    shorter = [
        view._replace(length=tokens, page_idxs=view.page_idxs[: -(-tokens // 16)])
        for view, (_, tokens) in zip(views, rows, strict=True)
    ]
    return build_paged_indptrs(shorter, 16)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_nothing_give_zero_on_the_card(causal: bool) -> None:
    geometry = params(causal=causal)
    views = make_views([(2, 0), (4, 2), (1, 3), (1, 0)], 16)
    indptrs = build_paged_indptrs(views, 16)
    pool, query = make_pool(views, geometry), make_query(indptrs, geometry)
    actual = attend(query, pool, indptrs, geometry, "flashinfer")
    expected = attend(query, pool, indptrs, geometry, "reference")
    assert_close(actual, expected)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("causal", [True, False])
def test_context_and_new_tokens_merge_on_the_card(causal: bool) -> None:
    geometry = params(causal=causal)
    views = make_views([(3, 10), (4, 4), (20, 180)], 16)
    pool = make_pool(views, geometry)
    indptrs = build_paged_indptrs(views, 16)
    query = make_query(indptrs, geometry)
    new = torch.cat(
        [
            torch.cat([pool[page].transpose(0, 1) for page in view.page_idxs])[
                view.length - view.to_compute : view.length
            ]
            for view in views
        ]
    )
    keys, values = new.unbind(dim=1)
    actual = attend_context_and_new(query, keys, values, pool, views, geometry, "flashinfer")
    assert_close(actual, attend(query, pool, indptrs, geometry, "reference"))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="needs float16 or bfloat16, got torch.float32"):
        FlashInferPlanner(params(), "cpu", torch.float32)


def test_mla_with_a_soft_cap_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="soft cap"):
        FlashInferPlanner(latent(soft_cap=2.0), "cpu", torch.bfloat16)


def test_running_needs_a_plan() -> None:
    planner = FlashInferPlanner(params(), "cpu", torch.bfloat16)
    with pytest.raises(RuntimeError, match="call plan first"):
        planner.run(torch.zeros(1, 8, 128), torch.zeros(1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (DECODE, "got 5 rows, 5 queries and 44 pages"),
        ([(1, 3), (2, 9), (1, 4)], "got 3 rows, 4 queries and 3 pages"),
        ([(1, 3), (1, 0), (1, 4)], "a key to see .* got 3 rows, 3 queries and 2 pages"),
        ([(1, 3)] * 2 + [(1, 700)], "got 3 rows, 3 queries and 46 pages"),
    ],
)
def test_a_captured_decode_takes_its_own_size_only(
    rows: list[tuple[int, int]], message: str
) -> None:
    size = GraphSize(num_rows=3, max_pages=40)
    planner = FlashInferPlanner(params(), "cpu", torch.bfloat16, size)
    with pytest.raises(ValueError, match=message):
        planner.plan(build_paged_indptrs(make_views(rows, 16), 16))


def test_queries_before_the_first_key_are_found() -> None:
    queries, kv_lens = np.array([3, 2, 1, 2]), np.array([1, 5, 1, 0])
    causal = _blind_queries(queries, kv_lens, causal=True)
    full = _blind_queries(queries, kv_lens, causal=False)
    assert causal is not None and full is not None
    assert causal.tolist() == [True, True, False, False, False, False, True, True]
    assert full.tolist() == [False] * 6 + [True, True]
    assert _blind_queries(queries[1:3], kv_lens[1:3], causal=True) is None
