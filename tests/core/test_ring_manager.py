import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mstar_plugin.kv.config import (
    KVSpec,
    KVStep,
    PagedKVConfig,
    RingKVConfig,
    RingKVLayerConfig,
    RingKVStep,
)
from mstar_plugin.ring.geometry import visible_slots
from mstar_plugin.ring.manager import RingKVManager
from mstar_plugin.ring.plan import RingPlan
from mstar_plugin.step import AdmitOutcome, AdmitRuntimeError, Segment, StepContext

T, H, D = 4, 2, 8
LAYERS = (RingKVLayerConfig(4, 4, 1), RingKVLayerConfig(6, 3, 2))


def make_manager(num_sessions: int = 2, **changes: Any) -> RingKVManager:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": H,
        "head_dim": D,
        "tokens_per_frame": T,
        "layers": LAYERS,
        "num_sessions": num_sessions,
    }
    manager = RingKVManager(RingKVConfig(**{**fields, **changes}), block_tokens=T)
    for rid in ("a", "b", "c"):
        manager.ingest_request(rid)
    return manager


def admit(manager: RingKVManager, *frames: tuple[str, int]) -> AdmitOutcome:
    ctx = StepContext(request_ids=[rid for rid, _ in frames])
    return manager.admit(RingKVStep(frames=frames), ctx)


def reason(outcome: AdmitOutcome) -> str:
    assert (outcome.ok, outcome.ready) == (False, False)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    return outcome.reason.message


def run(manager: RingKVManager, *frames: tuple[str, int], value: float = 1.0) -> RingPlan:
    """One step with a single committing pass that writes `value` everywhere."""
    step = RingKVStep(frames=frames)
    ctx = StepContext(request_ids=[rid for rid, _ in frames])
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    kv = torch.full((len(frames), H, T, D), value)
    for cache in manager.layers:
        cache.upsert(kv, kv, plan.session_idx, plan.frame_pos, commit=True)
    manager.commit(step, ctx)
    return plan


def snapshot(manager: RingKVManager) -> list[Tensor]:
    return [t.clone() for cache in manager.layers for t in (cache.kv, cache.written)]


def places(plan: RingPlan, layer: int, row: int) -> list[int]:
    table = plan.tables[layer]
    listed: list[int] = table.places[row, : int(table.counts[row])].tolist()
    return listed


def test_the_spec_of_a_ring_builds_this_manager_and_no_other() -> None:
    config = make_manager().config
    spec = KVSpec(resource_key="ring", nodes={"decoder"}, config=config)
    assert spec.resource_class is RingKVManager
    assert isinstance(RingKVManager.build(spec, block_tokens=T), RingKVManager)
    paged = PagedKVConfig(num_layers=1, num_kv_heads=1, head_dim=8, max_seq_len=16)
    with pytest.raises(TypeError, match="RingKVConfig, got PagedKVConfig"):
        RingKVManager.build(KVSpec(resource_key="kv", nodes={"decoder"}, config=paged))


def test_a_step_of_another_resource_is_a_type_error_everywhere() -> None:
    manager, ctx = make_manager(), StepContext(request_ids=["a"])
    for call in (manager.admit, manager.plan, manager.commit):
        with pytest.raises(TypeError, match="takes a RingKVStep, got KVStep"):
            call(KVStep(), ctx)


def test_steps_are_never_planned_ahead() -> None:
    assert make_manager().supports_preplan is False


def test_admission_claims_the_lowest_free_session_in_batch_order() -> None:
    manager = make_manager(num_sessions=3)
    assert run(manager, ("b", 0), ("a", 0)).session_idx.tolist() == [0, 1]
    manager.remove_request("b")
    assert run(manager, ("c", 5), ("a", 1)).session_idx.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("frames", "ids", "message"),
    [
        ([("a", 1)], ["a", "a"], r"each request must appear once .* got \['a'\]"),
        ([("a", 1), ("a", 1)], ["a"], "each clock of request must appear once"),
        ([("a", 1), ("x", 0)], ["a", "x"], "request 'x' was never ingested"),
        ([("a", 1)], ["a", "b"], "frames must give request 'b' a clock"),
        ([("a", 1), ("b", 0)], ["a"], r"requests of the batch only, got \['b'\]"),
        ([("a", 2)], ["a"], "clock of request 'a' must be 1, .* got 2"),
        ([("a", 0)], ["a"], "clock of request 'a' must be 1, .* got 0"),
        ([("b", -1)], ["b"], "clock of request 'b' must be an integer in .* got -1"),
        ([("b", 2**63)], ["b"], "clock of request 'b' must be an integer"),
        ([("b", True)], ["b"], "must be an integer in .* got True"),
        ([("b", 0), ("c", 0)], ["b", "c"], "num_sessions=2 .* request 'c' needs one"),
    ],
)
def test_a_step_that_cannot_run_is_refused_and_changes_nothing(
    frames: list[tuple[str, int]], ids: list[str], message: str
) -> None:
    manager = make_manager(num_sessions=2)
    run(manager, ("a", 0))
    before = snapshot(manager)
    outcome = manager.admit(RingKVStep(frames=tuple(frames)), StepContext(request_ids=ids))
    assert re.search(message, reason(outcome))
    assert all(torch.equal(x, y) for x, y in zip(before, snapshot(manager), strict=True))
    assert run(manager, ("a", 1), ("c", 7)).session_idx.tolist() == [0, 1]


def test_a_segment_that_ends_inside_a_frame_is_refused() -> None:
    manager = make_manager()
    segments = (Segment("a", "main", T + 1),)
    step = RingKVStep(segments=segments, frames=(("a", 0),))
    message = reason(manager.admit(step, StepContext(request_ids=["a"])))
    assert message.startswith("span of request 'a' must be whole frames of 4 tokens, got 5")


def test_an_admitted_step_may_be_admitted_again_at_its_clock() -> None:
    manager = make_manager()
    run(manager, ("a", 3))
    assert admit(manager, ("a", 4)).ok
    assert admit(manager, ("a", 4)).ok
    assert "must be 4" in reason(admit(manager, ("a", 5)))
    run(manager, ("a", 4))
    assert admit(manager, ("a", 5)).ok


def test_taking_back_an_admission_frees_only_the_sessions_it_claimed() -> None:
    manager = make_manager(num_sessions=2)
    run(manager, ("a", 0))
    step, ctx = RingKVStep(frames=(("a", 1), ("b", 0))), StepContext(request_ids=["a", "b"])
    assert manager.admit(step, ctx).ok
    manager.rollback_admit(step, ctx)
    with pytest.raises(RuntimeError, match="frame 1 of request 'a' must be admitted first"):
        manager.plan(RingKVStep(frames=(("a", 1),)), StepContext(request_ids=["a"]))
    assert run(manager, ("c", 0), ("a", 1)).session_idx.tolist() == [1, 0]


def test_taking_back_an_admission_keeps_a_loaded_world() -> None:
    manager = make_manager(num_sessions=2)
    run(manager, ("a", 0), value=4.0)
    manager.load_state("b", manager.get_state("a"))
    step, ctx = RingKVStep(frames=(("b", 1),)), StepContext(request_ids=["b"])
    manager.admit(step, ctx)
    manager.rollback_admit(step, ctx)
    assert manager.get_state("b")[0]["kv"].max() == 4


def test_each_rank_keeps_its_share_of_the_heads() -> None:
    config = make_manager().config
    manager = RingKVManager(config, block_tokens=T, world_size=2)
    assert manager.layers[0].keys.shape[1] == H // 2
    assert manager.memory_report().session_bytes == (5 + 7) * T * 2 * (H // 2) * D * 4


def test_planning_and_committing_follow_admission() -> None:
    manager, ctx = make_manager(), StepContext(request_ids=["a"])
    for call in (manager.plan, manager.commit):
        with pytest.raises(KeyError, match="'a' holds no ring session"):
            call(RingKVStep(frames=(("a", 0),)), ctx)
    admit(manager, ("a", 0))
    for call in (manager.plan, manager.commit):
        with pytest.raises(RuntimeError, match="frame 1 of request 'a' must be admitted first"):
            call(RingKVStep(frames=(("a", 1),)), ctx)


def test_one_stale_row_keeps_the_whole_commit_from_happening() -> None:
    manager = make_manager()
    admit(manager, ("a", 0), ("b", 0))
    with pytest.raises(RuntimeError, match="frame 1 of request 'b'"):
        manager.commit(RingKVStep(frames=(("a", 0), ("b", 1))), StepContext(request_ids=["a", "b"]))
    assert admit(manager, ("a", 0), ("b", 0)).ok


def test_a_plan_lists_rows_clocks_and_places_of_each_geometry() -> None:
    manager = make_manager()
    for frame in range(5):
        run(manager, ("a", frame))
    plan = run(manager, ("b", 9), ("a", 5))
    assert plan.request_ids == ("b", "a")
    assert (plan.session_idx.tolist(), plan.frame_pos.tolist()) == ([1, 0], [9, 5])
    assert plan.frame_pos.dtype == plan.session_idx.dtype == torch.int64
    assert places(plan, 0, 0) == [5 + 4]
    assert places(plan, 0, 1) == [*visible_slots(5, 1, 4), 4] == [0, 2, 3, 4]
    assert places(plan, 1, 0) == [7 + 6]
    assert places(plan, 1, 1) == [*visible_slots(5, 2, 3), 6] == [0, 1, 2, 6]


def test_layers_of_one_geometry_share_a_table() -> None:
    manager = make_manager(num_layers=3, layers=(LAYERS[0], LAYERS[1], LAYERS[0]))
    plan = run(manager, ("a", 0))
    assert plan.tables[0] is plan.tables[2]
    assert plan.tables[0] is not plan.tables[1]


def test_padding_rows_share_the_last_session_and_see_their_scratch_frame() -> None:
    manager = make_manager(num_sessions=2)
    run(manager, ("a", 0))
    step = RingKVStep(frames=(("a", 1),))
    ctx = StepContext(request_ids=["a"], padded_request_ids=["a", "pad0", "pad1"])
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    assert plan.session_idx.tolist() == [0, 2, 2]
    assert plan.frame_pos.tolist() == [1, 0, 0]
    assert places(plan, 0, 1) == places(plan, 0, 2) == [2 * 5 + 4]


def test_plans_of_equal_size_reuse_their_buffers() -> None:
    manager = make_manager()
    first, second = run(manager, ("a", 0)), run(manager, ("a", 1))
    assert first.frame_pos.data_ptr() == second.frame_pos.data_ptr()
    assert first.tables[0].places.data_ptr() == second.tables[0].places.data_ptr()
    assert run(manager, ("a", 2), ("b", 0)).frame_pos.data_ptr() != first.frame_pos.data_ptr()


@pytest.mark.parametrize("forget", ["reset_request", "remove_request"])
def test_forgetting_a_request_zeroes_its_session_only(forget: str) -> None:
    manager = make_manager()
    for frame in range(3):
        run(manager, ("a", frame), ("b", frame), value=3.0)
    other = manager.get_state("b")
    getattr(manager, forget)("a")
    for cache, state in zip(manager.layers, other, strict=True):
        assert not cache.kv[..., : cache.capacity, :].any()
        assert not any(cache.written_slots(0))
        assert torch.equal(cache.get_state(1)["kv"], state["kv"])
    manager.ingest_request("a")
    assert places(run(manager, ("a", 40), ("b", 3)), 0, 0) == [4]


def test_removing_an_unknown_request_changes_nothing() -> None:
    manager = make_manager()
    manager.remove_request("nobody")
    manager.reset_request("nobody")
    assert run(manager, ("a", 0)).session_idx.tolist() == [0]


def test_a_removed_request_must_be_ingested_again() -> None:
    manager = make_manager()
    run(manager, ("a", 0))
    manager.remove_request("a")
    assert "'a' was never ingested" in reason(admit(manager, ("a", 1)))


def test_a_forked_world_continues_on_its_own() -> None:
    manager = make_manager()
    for frame in range(6):
        run(manager, ("a", frame), value=1.0 + frame)
    manager.load_state("b", manager.get_state("a"))
    assert torch.equal(manager.get_state("b")[0]["kv"], manager.get_state("a")[0]["kv"])
    plan = run(manager, ("a", 6), ("b", 6), value=50.0)
    own = [[p % 5 for p in places(plan, 0, row)] for row in (0, 1)]
    assert own[0] == own[1] == [0, 1, 3, 4]
    run(manager, ("b", 7), value=60.0)
    assert manager.get_state("a")[0]["kv"].max() == 50
    assert manager.get_state("b")[0]["kv"].max() == 60


def test_a_saved_world_moves_to_another_manager_through_a_file() -> None:
    source, target = make_manager(), make_manager(num_sessions=1)
    for frame in range(9):
        run(source, ("a", frame), value=1.0 + frame)
    saved = io.BytesIO()
    torch.save(source.get_state("a"), saved)
    saved.seek(0)
    target.load_state("c", torch.load(saved, weights_only=True))
    before = places(run(source, ("a", 9)), 1, 0)
    assert places(run(target, ("c", 9)), 1, 0) == before
    assert torch.equal(target.get_state("c")[1]["kv"], source.get_state("a")[1]["kv"])


def test_a_loaded_world_may_continue_at_any_clock() -> None:
    manager = make_manager()
    for frame in range(3):
        run(manager, ("a", frame))
    manager.load_state("a", manager.get_state("a"))
    assert places(run(manager, ("a", 100)), 0, 0) == [1, 2, 4]


@pytest.mark.parametrize("fault", ["layers", "shape"])
def test_a_state_that_does_not_fit_is_refused_and_claims_nothing(fault: str) -> None:
    manager = make_manager()
    run(manager, ("a", 0))
    state = manager.get_state("a")
    if fault == "layers":
        state.pop()
    else:
        state[1]["kv"] = state[1]["kv"][:, :, :-T]
    before = snapshot(manager)
    with pytest.raises(ValueError, match=r"state must hold 2 layers, got 1|kv must be .* of shape"):
        manager.load_state("b", state)
    assert all(torch.equal(x, y) for x, y in zip(before, snapshot(manager), strict=True))
    assert run(manager, ("c", 0)).session_idx.tolist() == [1]


def test_a_state_needs_a_known_request_and_a_free_session() -> None:
    manager = make_manager(num_sessions=1)
    run(manager, ("a", 0))
    state = manager.get_state("a")
    with pytest.raises(RuntimeError, match="num_sessions=1 ring sessions are all taken"):
        manager.load_state("b", state)
    with pytest.raises(KeyError, match="'x' was never ingested"):
        manager.load_state("x", state)
    with pytest.raises(KeyError, match="'b' holds no ring session"):
        manager.get_state("b")


def test_warmup_must_leave_no_session_and_no_frame_behind() -> None:
    manager = make_manager()
    manager.post_warmup_validate()
    run(manager, ("a", 0))
    with pytest.raises(RuntimeError, match=r"leave no session claimed, got \['a'\]"):
        manager.post_warmup_validate()
    manager.remove_request("a")
    manager.post_warmup_validate()
    manager.layers[1].written[0] = True
    with pytest.raises(RuntimeError, match="session 0 of layer 1 holds frames"):
        manager.post_warmup_validate()


def test_warmup_on_padding_rows_passes_validation() -> None:
    manager = make_manager()
    step, ctx = RingKVStep(frames=()), StepContext(request_ids=[], padded_request_ids=["p", "q"])
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    kv = torch.ones(2, H, T, D)
    manager.layers[0].upsert(kv, kv, plan.session_idx, plan.frame_pos, commit=True)
    manager.commit(step, ctx)
    manager.post_warmup_validate()


def test_the_memory_report_is_what_is_allocated_padding_session_included() -> None:
    manager = make_manager(num_sessions=3)
    report = manager.memory_report()
    assert report.total_sessions == 4
    assert report.total_bytes == sum(c.kv.numel() * 4 for c in manager.layers)
    assert report.session_bytes == (5 + 7) * T * 2 * H * D * 4
    assert "4 sessions (one of them for padding rows)" in str(report)


def test_memory_does_not_grow_with_the_number_of_frames() -> None:
    manager = make_manager()
    storages = [cache.kv.data_ptr() for cache in manager.layers]
    for frame in range(300):
        run(manager, ("a", frame))
    assert [cache.kv.data_ptr() for cache in manager.layers] == storages
    assert len(manager.get_state("a")) == 2


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.sets(st.sampled_from("abc"), min_size=1), max_size=25))
def test_sessions_in_any_mix_of_batches_see_what_they_would_see_alone(
    steps: Sequence[set[str]],
) -> None:
    manager = make_manager(num_sessions=3)
    clocks = dict.fromkeys("abc", 0)
    for chosen in steps:
        plan = run(manager, *((rid, clocks[rid]) for rid in sorted(chosen)))
        for row, rid in enumerate(sorted(chosen)):
            session = int(plan.session_idx[row])
            for layer, g in enumerate(LAYERS):
                seen = visible_slots(clocks[rid], g.pinned_dilation, g.ring_buckets)
                first = session * (g.ring_frames + 1)
                assert places(plan, layer, row) == [first + s for s in (*seen, g.ring_frames)]
            clocks[rid] += 1
