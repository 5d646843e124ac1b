"""Admission, planning and commit of steps, without forks, retention or sharing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar_plugin.kv.config import (
    KVLayout,
    KVReqConfig,
    KVSpec,
    KVStep,
    PagedKVConfig,
    RingKVConfig,
    RingKVLayerConfig,
    RingKVStep,
)
from mstar_plugin.kv.manager import KVManager
from mstar_plugin.kv.plan import SequenceView, build_paged_indptrs
from mstar_plugin.kv.planner import read_rows
from mstar_plugin.step import AdmitRuntimeError, AllocationFailed, ResourceStep, StepContext


def test_a_spec_builds_the_manager_it_names() -> None:
    config = PagedKVConfig(num_layers=1, num_kv_heads=4, head_dim=2, max_seq_len=8, max_num_pages=4)
    spec = KVSpec("kv", {"llm"}, config)
    manager = spec.resource_class.build(spec, world_size=2, dtype=torch.bfloat16)
    assert isinstance(manager, KVManager)
    assert manager.layer_view(0).shape == (4, 2, 128, 2, 2)
    assert manager.layer_view(0).dtype == torch.bfloat16


def test_a_ring_spec_is_refused_by_the_paged_manager() -> None:
    ring = RingKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        tokens_per_frame=128,
        layers=(RingKVLayerConfig(4, 4, 1),),
    )
    with pytest.raises(TypeError, match="PagedKVConfig, resource 'kv' has RingKVConfig"):
        KVManager.build(KVSpec("kv", {"llm"}, ring))


@pytest.mark.parametrize("step", [ResourceStep(()), RingKVStep((), frames=())])
def test_a_step_for_another_resource_is_a_type_error(driver: Any, step: ResourceStep) -> None:
    with pytest.raises(TypeError, match="takes a KVStep"):
        driver.manager.admit(step, StepContext(request_ids=()))


def test_streams_show_what_was_written_over_prefill_chunks_and_decode(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 7), ("b", "main", 3))
    driver.run(("a", "main", 6), ("b", "main", 1))
    for _ in range(9):
        driver.run(("a", "main", 1), ("b", "main", 1))
    assert driver.manager.stored_tokens("a") == 22


def test_a_plan_has_the_arrays_that_its_views_build(driver: Any) -> None:
    driver.ingest("a", "b", "c")
    driver.run(("a", "main", 16), ("b", "main", 9), ("c", "main", 1))
    outputs = driver.run(("a", "main", 4), ("b", "main", 0), ("c", "main", 3))
    output = outputs["main"]
    expected = build_paged_indptrs(output.views, 4)
    for name, array in output.cpu_indptrs.to_kwargs_dict().items():
        assert torch.equal(array, getattr(expected, name)), name
        assert array.dtype == torch.int32
    assert [view.length for view in output.views] == [20, 9, 4]
    assert [view.to_compute for view in output.views] == [4, 0, 3]
    assert output.rows == [("a", "main"), ("b", "main"), ("c", "main")]
    assert output.get_total_len() == 7
    assert not output.is_decode


def test_a_decode_plan_says_where_each_new_token_goes(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 4), ("b", "main", 6))
    output = driver.run(("a", "main", 1), ("b", "main", 1))["main"]
    assert output.is_decode
    assert np.array_equal(output.decode_offsets, [0, 2])
    assert np.array_equal(output.decode_pages, [v.page_idxs[-1] for v in output.views])


def test_a_zero_span_reads_the_stream_and_takes_nothing(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 4))
    free = driver.manager.num_free_pages
    output = driver.run(("a", "main", 0))["main"]
    assert output.views[0].length == 4
    assert driver.manager.num_free_pages == free


def test_the_same_step_planned_twice_gives_equal_arrays(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 5))
    step, ctx = driver.declare([("a", "main", 3), ("b", "main", 2)])
    assert driver.manager.admit(step, ctx).ok
    first, second = (driver.manager.plan(step, ctx)["main"] for _ in range(2))
    assert first.views == second.views
    driver.finish(step, ctx, driver.manager.plan(step, ctx))


def test_admitting_a_step_again_takes_nothing_more(driver: Any) -> None:
    driver.ingest("a")
    step, ctx = driver.declare([("a", "main", 9)])
    driver.manager.admit(step, ctx)
    free = driver.manager.num_free_pages
    assert driver.manager.admit(step, ctx).ok
    assert driver.manager.num_free_pages == free


def test_another_step_on_a_stream_in_flight_is_refused_for_good(driver: Any) -> None:
    driver.ingest("a")
    driver.manager.admit(*driver.declare([("a", "main", 9)]))
    reason = driver.refused(("a", "main", 1))
    assert isinstance(reason, AdmitRuntimeError)
    assert "label 'main' of request 'a' has a step in flight" in reason.message


def test_an_uncommitted_step_keeps_its_pages_and_is_overwritten_by_the_next(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 3))
    generation = driver.run(("a", "main", 9), commit=False)["main"].views[0].generation
    free = driver.manager.num_free_pages
    view = driver.run(("a", "main", 2))["main"].views[0]
    assert driver.manager.num_free_pages == free
    assert view.page_idxs == view.page_idxs[:2]
    assert (view.length, view.generation) == (5, generation)


def test_admission_is_all_or_nothing_and_names_who_is_short(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=6)
    driver.ingest("a", "b")
    driver.run(("a", "main", 8))
    reason = driver.refused(("a", "main", 4), ("b", "main", 12))
    assert isinstance(reason, AllocationFailed)
    assert (reason.pages_short, reason.label, reason.request_id) == (1, "main", "b")
    assert driver.manager.num_free_pages == 3
    driver.manager.remove_request("a")
    driver.forget("a")
    driver.run(("b", "main", 12))


@pytest.mark.parametrize("tokens", [20, 19])
def test_a_prompt_of_the_whole_pool_without_the_sink_runs(make_driver: Any, tokens: int) -> None:
    driver = make_driver(max_num_pages=6)
    driver.ingest("a")
    driver.run(("a", "main", tokens))


def test_a_request_that_can_never_fit_is_failed_and_not_retried(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=6)
    driver.ingest("a", "b")
    driver.run(("b", "main", 8))
    reason = driver.refused(("a", "main", 21))
    assert isinstance(reason, AdmitRuntimeError)
    assert "request 'a' needs 6 pages at once and the pool has 5" in reason.message


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([("ghost", "main", 1)], "'ghost' must be ingested"),
        ([("a", "main", 1), ("a", "main", 1)], "once in a step"),
        ([("a", "main", -1)], "0 or more, got -1"),
    ],
)
def test_a_step_that_can_never_run_is_refused_for_good(
    driver: Any, segments: list[tuple[str, str, int]], message: str
) -> None:
    driver.ingest("a")
    reason = driver.refused(*segments)
    assert isinstance(reason, AdmitRuntimeError)
    assert message in reason.message


def test_a_step_without_segments_is_refused_for_good(driver: Any) -> None:
    outcome = driver.manager.admit(KVStep(), StepContext(request_ids=()))
    assert "got None" in outcome.reason.message


def test_a_combination_without_one_of_its_labels_is_refused_for_good(driver: Any) -> None:
    driver.ingest("a")
    reason = driver.refused(("a", "main", 1), combined_labels={("main", "uncond"): "cfg"})
    assert isinstance(reason, AdmitRuntimeError)
    assert "'uncond'" in reason.message


def test_planning_or_committing_what_is_not_admitted_is_the_wrong_moment(driver: Any) -> None:
    driver.ingest("a")
    step, ctx = driver.declare([("a", "main", 1)])
    for call in (driver.manager.plan, driver.manager.commit, driver.manager.rollback_admit):
        with pytest.raises(RuntimeError, match="must be admitted"):
            call(step, ctx)


def test_rolling_back_gives_back_exactly_what_was_taken_and_changes_the_generation(
    driver: Any,
) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 6))
    driver.run(("a", "main", 9), commit=False)
    free = driver.manager.num_free_pages
    before = driver.run(("a", "main", 0))["main"].views[0]
    step, ctx = driver.declare([("a", "main", 30), ("b", "main", 3), ("b", "other", 3)])
    assert driver.manager.admit(step, ctx).ok
    driver.manager.rollback_admit(step, ctx)
    driver.check()
    assert driver.manager.num_free_pages == free
    after = driver.run(("a", "main", 0))["main"].views[0]
    assert after.page_idxs == before.page_idxs
    assert after.generation != before.generation
    with pytest.raises(KeyError, match="'other'"):
        driver.manager.stored_tokens("b", "other")


def test_rolling_back_a_repeated_step_leaves_what_the_one_before_it_opened(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "other", 5), commit=False)
    free = driver.manager.num_free_pages
    step, ctx = driver.declare([("a", "other", 5)], commit=False)
    driver.manager.admit(step, ctx)
    driver.manager.rollback_admit(step, ctx)
    assert driver.manager.num_free_pages == free
    assert driver.manager.stored_tokens("a", "other") == 0


def test_a_repeated_step_finds_a_request_that_was_reset_or_came_back(driver: Any) -> None:
    driver.ingest("a", "b")
    step, ctx = driver.declare([("a", "main", 2), ("b", "main", 2)])
    for change in ("nothing", "reset", "remove", "mid-step"):
        driver.manager.admit(step, ctx)
        outputs = driver.manager.plan(step, ctx)
        if change == "mid-step":
            driver.manager.reset_request("a")
            driver.tokens["a", "main"] = []
            driver.manager.commit(step, ctx)
            driver.tokens["b", "main"] += [0, 0]
        else:
            driver.finish(step, ctx, outputs)
        if change == "reset":
            driver.manager.reset_request("a", free=True)
            driver.tokens["a", "main"] = []
        if change == "remove":
            driver.manager.remove_request("a")
            driver.forget("a")
            driver.ingest("a")
    driver.manager.admit(step, ctx)
    assert [view.length for view in driver.manager.plan(step, ctx)["main"].views] == [2, 10]


def test_a_plan_after_a_rollback_equals_one_from_scratch(make_driver: Any) -> None:
    views = []
    for rolls_back in (True, False):
        driver = make_driver()
        driver.ingest("a", "b")
        driver.run(("a", "main", 6))
        if rolls_back:
            undone = driver.declare([("a", "main", 9), ("b", "main", 9)])
            driver.manager.admit(*undone)
            driver.manager.rollback_admit(*undone)
        output = driver.run(("a", "main", 5), ("b", "main", 5))["main"]
        views.append([v._replace(generation=0) for v in output.views])
    assert views[0] == views[1]


def test_combined_labels_are_packed_label_after_label(driver: Any) -> None:
    driver.ingest("a", "b")
    output = driver.run(
        ("a", "main", 4),
        ("a", "uncond", 4),
        ("b", "main", 6),
        ("b", "uncond", 6),
        ("b", "x", 1),
        combined_labels={("main", "uncond"): "_cfg"},
    )
    assert list(output) == ["_cfg", "x"]
    assert output["_cfg"].cpu_indptrs.qo_indptr.tolist() == [0, 4, 10, 14, 20]
    driver.run(("a", "uncond", 3), ("b", "main", 1))


def test_padding_rows_read_and_write_the_sink_and_take_nothing(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 4))
    free = driver.manager.num_free_pages
    step, ctx = driver.declare(
        [("a", "main", 1), ("pad", "main", 1)],
        request_ids=("a",),
        padded_request_ids=("a", "pad"),
    )
    assert driver.manager.admit(step, ctx).ok
    output = driver.manager.plan(step, ctx)["main"]
    assert output.views[1].page_idxs == [0]
    assert output.decode_pages.tolist()[1] == 0
    k, v = driver.values([90, 91], 0)
    driver.manager.write_kv(k, v, layer=0)
    driver.manager.commit(step, ctx)
    driver.manager.assert_pages_conserved()
    assert driver.manager.num_free_pages == free - 1
    assert driver.manager.stored_tokens("a") == 5


def test_a_dummy_id_takes_nothing_even_when_it_is_a_known_request(driver: Any) -> None:
    driver.ingest("a", "dummy")
    driver.run(("dummy", "main", 3))
    free = driver.manager.num_free_pages
    step, ctx = driver.declare(
        [("a", "main", 1), ("dummy", "main", 5)],
        request_ids=("a",),
        padded_request_ids=("a", "dummy"),
    )
    driver.manager.admit(step, ctx)
    assert driver.manager.plan(step, ctx)["main"].views[1].page_idxs == [0, 0]
    driver.manager.commit(step, ctx)
    assert driver.manager.num_free_pages == free - 1
    assert driver.manager.stored_tokens("dummy") == 3


def test_a_sink_stream_changes_neither_pages_nor_length(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6), ("a", "uncond", 5))
    free = driver.manager.num_free_pages
    output = driver.run(
        ("a", "main", 1),
        ("a", "uncond", 9),
        ("a", "new", 3),
        sink=frozenset([("a", "uncond"), ("a", "new")]),
    )
    assert output["uncond"].views[0].page_idxs == [0, 0, 0, 0]
    assert output["uncond"].views[0].length == 14
    assert output["new"].views[0].page_idxs == [0]
    assert driver.manager.num_free_pages == free
    assert driver.manager.stored_tokens("a", "uncond") == 5


def test_writes_of_a_captured_step_keep_their_address_and_end_in_the_sink(driver: Any) -> None:
    driver.manager.build_cuda_graph_buffers(8)
    driver.ingest("a")
    driver.run(("a", "main", 5))
    step, ctx = driver.declare([("a", "main", 2)])
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    k, v = driver.values([41, 42, 99, 99, 99], 0)
    driver.manager.write_kv(k, v, layer=0)
    driver.manager.commit(step, ctx)
    assert driver.manager.read_stream("a", "main", 0)[0][:, 0, 0].tolist()[-2:] == [41, 42]
    assert driver.manager.layer_view(0)[0, 0, 0, 0, 0] == 99


def test_a_wrong_number_of_rows_is_refused_with_the_shape_wanted(driver: Any) -> None:
    driver.ingest("a")
    step, ctx = driver.declare([("a", "main", 3)])
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    for count in (2, 4):
        k, v = driver.values(list(range(count)), 0)
        with pytest.raises(ValueError, match=r"k must have the shape"):
            driver.manager.write_kv(k, v, layer=0)
    k, v = driver.values([1, 2, 3], 0)
    with pytest.raises(ValueError, match="v must be given"):
        driver.manager.write_kv(k, None, layer=0)
    with pytest.raises(KeyError, match="'uncond'"):
        driver.manager.write_kv(k, v, layer=0, label="uncond")


def test_writing_after_the_commit_is_the_wrong_moment(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 3))
    with pytest.raises(RuntimeError, match="between plan and commit"):
        driver.manager.write_kv(*driver.values([1, 2, 3], 0), layer=0)


def test_cursors_name_the_layer_and_the_label(driver: Any) -> None:
    driver.ingest("a")
    step, ctx = driver.declare([("a", "main", 1), ("a", "x", 1)])
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    driver.manager.set_layer(1)
    driver.manager.write_kv(*driver.values([5], 1))
    driver.manager.set_label("x")
    driver.manager.write_kv(*driver.values([6], 1))
    assert driver.manager.read_kv()[0].flatten().tolist() == [6, 1]
    driver.manager.commit(step, ctx)
    assert driver.manager.read_stream("a", "main", 1)[0].flatten().tolist() == [5, 1]


def test_latent_rows_are_written_planned_and_read_without_v(make_driver: Any) -> None:
    driver = make_driver(layout=KVLayout.MLA, kv_lora_rank=1, qk_rope_head_dim=1, num_qo_heads=4)
    driver.ingest("a", "b")
    driver.run(("a", "main", 7), ("b", "main", 2))
    driver.run(("a", "main", 1), ("b", "main", 1), post_forks=(("main", "copy"),))
    assert driver.manager.layer_view(0).shape == (64, 4, 2)
    k, _ = driver.values([1], 0)
    step, ctx = driver.declare([("a", "main", 1)])
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    with pytest.raises(ValueError, match="v must be None"):
        driver.manager.write_kv(k, k, layer=0)


def test_has_room_counts_free_pages_and_trusts_unknown_requests(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=6)
    driver.ingest("a", needed_labels=["main", "uncond"])
    driver.run(("a", "main", 6))
    assert driver.manager.has_room("a", "node", "walk", 6)
    assert not driver.manager.has_room("a", "node", "walk", 7)
    assert driver.manager.has_room("nobody", "node", "walk", 10**9)


def test_a_request_whose_layout_cannot_fit_is_refused_when_it_is_ingested(driver: Any) -> None:
    config = KVReqConfig()
    config.apply_conductor_config(kv_layout={"main": [[[10_001, 10_001, "prefill"]]]})
    with pytest.raises(ValueError, match="max_seq_len=10000"):
        driver.manager.ingest_request("a", config)


def test_reset_keeps_the_pages_unless_told_to_free_them(driver: Any) -> None:
    driver.ingest("a")
    view = driver.run(("a", "main", 9))["main"].views[0]
    free = driver.manager.num_free_pages
    driver.manager.reset_request("a")
    driver.tokens["a", "main"] = []
    driver.check()
    assert driver.manager.num_free_pages == free
    after = driver.run(("a", "main", 5))["main"].views[0]
    assert after.page_idxs == view.page_idxs[:2]
    assert after.generation != view.generation
    driver.manager.reset_request("a", free=True)
    assert driver.manager.num_free_pages == 63


def test_removing_twice_or_an_unknown_request_changes_nothing(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 9))
    for request_id in ("a", "a", "ghost"):
        driver.manager.remove_request(request_id)
    assert driver.manager.num_free_pages == 63
    driver.manager.assert_pages_conserved()


def test_pages_of_a_request_removed_in_mid_step_wait_for_the_end_of_the_step(
    make_driver: Any,
) -> None:
    driver = make_driver(max_num_pages=8)
    driver.ingest("a", "b", "c")
    driver.run(("a", "main", 4), ("b", "main", 4))
    step, ctx = driver.declare([("a", "main", 5), ("b", "main", 1)])
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    driver.manager.remove_request("a")
    driver.forget("a")
    driver.manager.assert_pages_conserved()
    assert isinstance(driver.refused(("c", "main", 12)), AllocationFailed)
    for layer in range(2):
        driver.manager.write_kv(*driver.values([7, 7, 7, 7, 7, 8], layer), layer=layer)
    driver.manager.commit(step, ctx)
    driver.tokens["b", "main"].append(8)
    driver.check()
    driver.run(("c", "main", 12))


def test_the_generation_differs_when_a_removed_request_comes_back(driver: Any) -> None:
    seen = set()
    for _ in range(3):
        driver.ingest("a")
        seen.add(driver.run(("a", "main", 2))["main"].views[0].generation)
        driver.manager.remove_request("a")
        driver.forget("a")
    assert len(seen) == 3


def test_unread_slots_hold_zero_and_not_whatever_memory_held(driver: Any) -> None:
    assert all((driver.manager.layer_view(layer) == 0).all() for layer in range(2))


def test_more_streams_and_longer_ones_than_the_tables_started_with(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=512)
    names = [f"r{i}" for i in range(150)]
    driver.ingest(*names)
    driver.run(*[(name, "main", 1 + i % 5) for i, name in enumerate(names)])
    driver.run(("r7", "main", 200))
    driver.run(*[(name, "main", 1) for name in names])


def test_cache_rows_are_counted_in_64_bits() -> None:
    views = [SequenceView("a", "main", [1 << 23], 2, 2)]
    assert read_rows(build_paged_indptrs(views, 512), 512).tolist() == [1 << 32, (1 << 32) + 1]
