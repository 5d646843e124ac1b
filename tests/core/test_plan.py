"""The KV plan: views, index arrays, grouping and outputs, with worked numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.plan import (
    HostLens,
    KVPlanOutput,
    KVPlanOutputs,
    PagedIndptrs,
    PageIndices,
    PinnedIndexRing,
    SequenceView,
    build_paged_indptrs,
    context_only_views,
    group_by_plan_label,
)
from mstar_plugin.step import Segment

ROWS = [
    SequenceView("A", "main", [3, 7, 1], 20, 4),
    SequenceView("B", "main", [4, 2], 16, 1),
    SequenceView("C", "main", [9], 5, 5),
]


def as_lists(indptrs: PagedIndptrs) -> list[list[int]]:
    return [array.tolist() for array in indptrs if array is not None]


@pytest.mark.parametrize(("length", "expected"), [(16, 0), (17, 1), (7, 7), (0, 0)])
def test_last_page_len_is_zero_for_a_full_page(length: int, expected: int) -> None:
    assert SequenceView("a", "main", [], length, 1).last_page_len(8) == expected


def test_the_offset_of_the_first_token_counts() -> None:
    view = SequenceView("a", "main", [5, 6], 10, 1, start=3)
    assert view.last_page_len(8) == 5
    indptrs = build_paged_indptrs([view], 8)
    assert indptrs.paged_kv_last_page_len.tolist() == [5]
    assert indptrs.kv_lens is not None and indptrs.kv_lens.tolist() == [13]


@pytest.mark.parametrize("ring", [None, PinnedIndexRing()])
def test_worked_index_arrays(ring: PinnedIndexRing | None) -> None:
    indptrs = build_paged_indptrs(ROWS, 8, ring)
    assert as_lists(indptrs) == [
        [0, 4, 5, 10],
        [0, 3, 5, 6],
        [3, 7, 1, 4, 2, 9],
        [4, 8, 5],
        [20, 16, 5],
    ]
    for array in indptrs:
        assert array is not None
        assert array.dtype == torch.int32 and array.device.type == "cpu" and array.is_contiguous()
    assert type(indptrs.kv_lens) is HostLens


@pytest.mark.parametrize(
    ("length", "pages", "last"), [(1, 1, 1), (8, 1, 8), (9, 2, 1), (24, 3, 8), (25, 4, 1)]
)
def test_golden_arrays_around_page_ends(length: int, pages: int, last: int) -> None:
    view = SequenceView("a", "main", list(range(1, pages + 1)), length, 1)
    assert as_lists(build_paged_indptrs([view], 8)) == [
        [0, 1],
        [0, pages],
        list(range(1, pages + 1)),
        [last],
        [length],
    ]


def test_no_rows_give_empty_arrays() -> None:
    assert as_lists(build_paged_indptrs([], 8)) == [[0], [0], [], [], []]


def test_a_row_without_pages_has_no_tokens() -> None:
    empty = SequenceView("E", "main", [], 0, 3)
    assert as_lists(build_paged_indptrs([ROWS[2], empty, ROWS[1]], 8)) == [
        [0, 5, 8, 9],
        [0, 1, 1, 3],
        [9, 4, 2],
        [5, 0, 8],
        [5, 0, 16],
    ]


def test_packed_page_lists_give_the_same_arrays() -> None:
    packed = [view._replace(page_idxs=PageIndices(view.page_idxs)) for view in ROWS]
    mixed = [packed[0], *ROWS[1:]]
    expected = as_lists(build_paged_indptrs(ROWS, 8))
    assert as_lists(build_paged_indptrs(packed, 8)) == expected
    assert as_lists(build_paged_indptrs(mixed, 8)) == expected
    assert PageIndices([3, 7]) == [3, 7]


def test_page_ids_of_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        build_paged_indptrs([SequenceView("a", "main", [2**31], 3, 1)], 8)


rows = st.lists(
    st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), st.integers(1, 9)),
    max_size=8,
)


@given(rows=rows, page_size=st.integers(1, 9), data=st.data())
def test_arrays_say_what_the_views_say(
    rows: list[tuple[list[int], int]], page_size: int, data: st.DataObject
) -> None:
    views = []
    for index, (pages, queries) in enumerate(rows):
        most = len(pages) * page_size
        length = data.draw(st.integers(most - page_size + 1, most))
        views.append(SequenceView(f"r{index}", "main", pages, length, queries))
    ring = PinnedIndexRing(numel=2, depth=1)
    for built in (
        build_paged_indptrs(views, page_size),
        build_paged_indptrs(views, page_size, ring),
    ):
        assert as_lists(built) == [
            list(itertools.accumulate((v.to_compute for v in views), initial=0)),
            list(itertools.accumulate((len(v.page_idxs) for v in views), initial=0)),
            [page for v in views for page in v.page_idxs],
            [v.last_page_len(page_size) or page_size for v in views],
            [v.length for v in views],
        ]


def test_indptrs_move_without_their_host_lengths() -> None:
    indptrs = build_paged_indptrs(ROWS, 8)
    moved = indptrs.to_device("meta")
    assert all(array.device.type == "meta" for array in moved[:4])
    assert moved.kv_lens is indptrs.kv_lens


def test_indptrs_go_by_name() -> None:
    names = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len kv_lens"
    indptrs = build_paged_indptrs(ROWS, 8)
    assert " ".join(indptrs.to_kwargs_dict()) == names
    assert indptrs.to_kwargs_dict()["kv_lens"] is indptrs.kv_lens
    assert PagedIndptrs(*indptrs[:4]).kv_lens is None


def test_host_lengths_iterate_as_numpy_scalars() -> None:
    lens = build_paged_indptrs(ROWS, 8).kv_lens
    assert lens is not None
    assert all(isinstance(value, np.int32) for value in lens)
    assert max(lens).item() == 20 and type(max(lens).item()) is int
    assert sorted(lens) == [5, 16, 20]


def test_host_lengths_are_tensors_everywhere_else() -> None:
    lens = build_paged_indptrs(ROWS, 8).kv_lens
    assert lens is not None
    assert len(lens) == 3 and lens.min().item() == 5
    assert lens.cpu() is lens
    buffer = torch.zeros(3, dtype=torch.int32)
    buffer.copy_(lens)
    assert buffer.tolist() == [20, 16, 5]
    assert type(lens + 1) is torch.Tensor and type(lens[:2]) is torch.Tensor


@pytest.mark.parametrize(
    ("view", "query_span", "expected"),
    [
        (([3, 7, 1], 8, 3), 2, ([3, 7], 5, 2)),
        (([4, 2], 6, 3), 2, ([4], 3, 2)),
        (([5], 3, 3), 4, ([], 0, 4)),
    ],
)
def test_worked_context_only_views(
    view: tuple[list[int], int, int], query_span: int, expected: tuple[list[int], int, int]
) -> None:
    given_view = SequenceView("a", "main", *view, generation=7)
    (context,) = context_only_views([given_view], [query_span], 4)
    assert context == SequenceView("a", "main", *expected, generation=7)
    assert given_view == SequenceView("a", "main", *view, generation=7)


def test_context_only_keeps_the_offset_of_the_first_token() -> None:
    view = SequenceView("a", "main", [3, 7, 1], 7, 3, start=3)
    (context,) = context_only_views([view], [1], 4)
    (nothing,) = context_only_views([view._replace(to_compute=7)], [1], 4)
    assert (nothing.page_idxs, nothing.length, nothing.start) == ([], 0, 3)
    assert (context.page_idxs, context.length, context.start) == ([3, 7], 4, 3)


def test_context_only_needs_one_span_per_view() -> None:
    with pytest.raises(ValueError):
        context_only_views(ROWS, [1, 2], 8)


A_MAIN, A_UNCOND = Segment("a", "main", 4), Segment("a", "uncond", 4)
B_MAIN, B_UNCOND = Segment("b", "main", 6), Segment("b", "uncond", 6)
C_X = Segment("c", "x", 1)
STEP = (A_MAIN, A_UNCOND, B_MAIN, B_UNCOND, C_X)


def test_a_combination_packs_label_by_label() -> None:
    groups = group_by_plan_label(STEP, {("main", "uncond"): "_cfg"})
    assert list(groups.items()) == [("_cfg", [A_MAIN, B_MAIN, A_UNCOND, B_UNCOND]), ("x", [C_X])]
    views = [SequenceView(s.request_id, s.label, [1], s.span, s.span) for s in groups["_cfg"]]
    assert build_paged_indptrs(views, 8).qo_indptr.tolist() == [0, 4, 10, 14, 20]


def test_without_combinations_each_label_keeps_the_order_of_the_batch() -> None:
    groups = group_by_plan_label((B_UNCOND, A_MAIN, B_MAIN), {})
    assert list(groups.items()) == [("uncond", [B_UNCOND]), ("main", [A_MAIN, B_MAIN])]
    assert group_by_plan_label((), {}) == {}


def test_combinations_come_first_in_their_own_order() -> None:
    groups = group_by_plan_label(STEP, {("x",): "second", ("main",): "first"})
    assert list(groups) == ["second", "first", "uncond"]


def test_a_source_without_a_segment_is_named() -> None:
    with pytest.raises(KeyError, match=r"'_cfg'.*'ghost'.*main"):
        group_by_plan_label(STEP, {("main", "ghost"): "_cfg"})


@pytest.mark.parametrize(
    "combined", [{("main", "uncond"): "x"}, {("main",): "p", ("uncond",): "p"}]
)
def test_a_plan_label_is_unique(combined: dict[tuple[str, ...], str]) -> None:
    with pytest.raises(ValueError, match="must be unique"):
        group_by_plan_label(STEP, combined)


def test_a_combination_may_take_the_name_of_its_source() -> None:
    groups = group_by_plan_label((A_MAIN, A_UNCOND), {("main", "uncond"): "main"})
    assert groups == {"main": [A_MAIN, A_UNCOND]}


def test_views_are_built_on_first_use_and_once() -> None:
    calls = []

    def build() -> list[SequenceView]:
        calls.append(1)
        return list(ROWS)

    plan = KVPlanOutput(build_paged_indptrs(ROWS, 8), view_builder=build)
    assert not calls
    assert plan.views is plan.views and plan.views == ROWS
    assert calls == [1]
    assert KVPlanOutput(plan.cpu_indptrs, ROWS).views is ROWS


def test_a_plan_without_views_says_so() -> None:
    with pytest.raises(RuntimeError, match="view_builder"):
        _ = KVPlanOutput(build_paged_indptrs(ROWS, 8)).views


def test_a_plan_counts_its_query_tokens() -> None:
    assert KVPlanOutput(build_paged_indptrs(ROWS, 8)).get_total_len() == 10
    assert KVPlanOutput(build_paged_indptrs([], 8)).get_total_len() == 0


def test_decode_is_one_token_per_row() -> None:
    indptrs = build_paged_indptrs(ROWS, 8)
    one_each = [view._replace(to_compute=1) for view in ROWS]
    assert not KVPlanOutput(indptrs, ROWS).is_decode
    assert KVPlanOutput(indptrs, one_each).is_decode
    assert KVPlanOutput(indptrs, []).is_decode
    assert KVPlanOutput(indptrs, decode_pages=np.array([1])).is_decode


def test_a_plan_keeps_what_it_was_given() -> None:
    indptrs = build_paged_indptrs(ROWS, 8)
    pages, offsets = np.array([1, 2, 9]), np.array([3, 7, 4])
    rows = [("A", "main"), ("B", "main"), ("C", "main")]
    plan = KVPlanOutput(indptrs, ROWS, indptrs, pages, offsets, rows)
    assert plan.cuda_indptrs is indptrs and plan.rows is rows
    assert plan.decode_pages is pages and plan.decode_offsets is offsets


def test_outputs_are_a_dict_that_carries_the_forks() -> None:
    plan = KVPlanOutput(build_paged_indptrs(ROWS, 8))
    outputs = KVPlanOutputs({"main": plan}, (("main", "cfg"),), (("cfg", "main"),))
    assert isinstance(outputs, dict) and outputs == {"main": plan}
    assert (outputs.pre_forks, outputs.post_forks) == ((("main", "cfg"),), (("cfg", "main"),))
    assert KVPlanOutputs() == {}
    assert (KVPlanOutputs().pre_forks, KVPlanOutputs().post_forks) == ((), ())
