"""Steps admitted and planned while the one before them runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.step import AllocationFailed, StepContext

FORK = (("main", "copy"),)


def ahead(ctx: StepContext) -> StepContext:
    return StepContext(request_ids=ctx.request_ids, node=ctx.node, slot=ctx.slot, is_preplan=True)


def test_a_step_planned_ahead_takes_no_new_pages_when_it_comes(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    step, ctx = driver.declare([("a", "main", 3)])
    assert driver.manager.admit(step, ahead(ctx)).ok
    planned = driver.manager.plan(step, ahead(ctx))
    free = driver.manager.num_free_pages
    driver.manager.assert_pages_conserved()
    assert driver.manager.admit(step, ctx).ok
    assert driver.manager.plan(step, ctx) is planned
    assert driver.manager.num_free_pages == free
    driver.finish(step, ctx, planned)


def test_a_step_is_not_planned_ahead_before_the_one_before_it_is_committed(driver: Any) -> None:
    driver.ingest("a", "b")
    step, ctx = driver.declare([("a", "main", 3)])
    driver.manager.admit(step, ctx)
    later, later_ctx = driver.declare([("a", "main", 1), ("b", "other", 1)])
    with pytest.raises(RuntimeError, match="once the step before it is committed"):
        driver.manager.admit(later, ahead(later_ctx))
    with pytest.raises(KeyError):
        driver.manager.stored_tokens("b", "other")


def test_a_step_planned_ahead_sees_the_compacted_stream(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 30), retention={("a", "main"): RetentionPolicy(4)})
    step, ctx = driver.declare([("a", "main", 1)])
    driver.manager.admit(step, ahead(ctx))
    assert driver.manager.plan(step, ahead(ctx))["main"].views[0].length == 7


def test_another_step_clears_the_one_planned_ahead_whose_pages_stay(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 4))
    step, ctx = driver.declare([("a", "main", 9)])
    driver.manager.admit(step, ahead(ctx))
    free = driver.manager.num_free_pages
    driver.run(("a", "main", 2))
    assert driver.manager.num_free_pages == free
    driver.run(("a", "main", 7))
    assert driver.manager.num_free_pages == free


def test_clearing_closes_labels_that_only_the_cleared_step_opened(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 4))
    step, ctx = driver.declare([("a", "main", 1), ("a", "new", 5)])
    driver.manager.admit(step, ahead(ctx))
    driver.manager.clear_preplan()
    driver.check()
    with pytest.raises(KeyError, match="'new'"):
        driver.manager.stored_tokens("a", "new")
    assert driver.manager.num_free_pages == 61
    driver.manager.clear_preplan()


def test_a_fork_planned_ahead_is_foreseen_and_made_when_the_step_comes(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6), ("a", "copy", 3))
    step, ctx = driver.declare([("a", "main", 1), ("a", "copy", 2)], pre_forks=FORK)
    driver.manager.admit(step, ahead(ctx))
    foreseen = driver.manager.plan(step, ahead(ctx))
    assert foreseen["copy"].views[0].length == 8
    driver.check()
    driver.manager.admit(step, ctx)
    assert driver.manager.plan(step, ctx) is foreseen
    assert driver.manager.plan(step, ctx)["copy"].views == foreseen["copy"].views
    driver.finish(step, ctx, foreseen)


def test_a_fork_planned_ahead_and_cleared_leaves_the_target_as_it_was(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 9), ("a", "copy", 3))
    step, ctx = driver.declare([("a", "main", 1), ("a", "copy", 2)], pre_forks=FORK)
    driver.manager.admit(step, ahead(ctx))
    driver.manager.plan(step, ahead(ctx))
    driver.manager.clear_preplan()
    driver.check()
    driver.run(("a", "copy", 2))


def test_a_step_admitted_ahead_may_be_planned_only_when_it_comes(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    step, ctx = driver.declare([("a", "main", 1)], pre_forks=FORK)
    driver.manager.admit(step, ahead(ctx))
    driver.run(("a", "main", 1), pre_forks=FORK)
    assert driver.manager.stored_tokens("a", "copy") == 6


def test_admitting_ahead_is_all_or_nothing_too(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=4)
    driver.ingest("a", "b")
    driver.run(("a", "main", 8))
    step, ctx = driver.declare([("a", "main", 1), ("b", "main", 1)])
    outcome = driver.manager.admit(step, ahead(ctx))
    assert isinstance(outcome.reason, AllocationFailed)
    driver.check()
    driver.run(("a", "main", 1))


def test_a_step_admitted_ahead_can_be_rolled_back(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 4))
    step, ctx = driver.declare([("a", "main", 9)])
    driver.manager.admit(step, ahead(ctx))
    driver.manager.rollback_admit(step, ahead(ctx))
    driver.check()
    assert driver.manager.num_free_pages == 62


@pytest.mark.parametrize("call", ["reset_request", "remove_request"])
def test_resetting_or_removing_a_request_clears_a_step_planned_ahead_on_it(
    driver: Any, call: str
) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 4), ("b", "main", 4))
    step, ctx = driver.declare([("a", "main", 9), ("b", "main", 9)])
    driver.manager.admit(step, ahead(ctx))
    getattr(driver.manager, call)("a")
    driver.tokens["a", "main"] = []
    if call == "remove_request":
        driver.forget("a")
    driver.check()
    driver.run(("b", "main", 1))


def test_a_step_planned_ahead_does_not_disturb_the_forward_that_runs(driver: Any) -> None:
    driver.manager.build_cuda_graph_buffers(4)
    driver.ingest("a", "b")
    driver.run(("a", "main", 4), ("b", "main", 4))
    step, ctx = driver.declare([("a", "main", 1)])
    driver.manager.admit(step, ctx)
    outputs = driver.manager.plan(step, ctx)
    other, other_ctx = driver.declare([("b", "main", 3)])
    driver.manager.admit(other, ahead(other_ctx))
    driver.manager.plan(other, ahead(other_ctx))
    driver.finish(step, ctx, outputs)
    driver.manager.admit(other, other_ctx)
    driver.finish(other, other_ctx, driver.manager.plan(other, other_ctx))


def test_offloading_is_refused_while_a_step_is_planned_ahead(make_driver: Any) -> None:
    driver = make_driver(cpu_offload_pages=16)
    driver.ingest("a")
    driver.run(("a", "main", 4))
    step, ctx = driver.declare([("a", "main", 1)])
    driver.manager.admit(step, ahead(ctx))
    assert driver.manager.offload("a") == 0
    driver.manager.clear_preplan()
    assert driver.manager.offload("a") > 0


def test_plans_for_both_moments_hold_equal_arrays(make_driver: Any) -> None:
    plans = []
    for early in (True, False):
        driver = make_driver()
        driver.ingest("a", "b")
        driver.run(("a", "main", 9), ("b", "main", 2))
        step, ctx = driver.declare([("a", "main", 2), ("b", "main", 2)], pre_forks=FORK)
        if early:
            driver.manager.admit(step, ahead(ctx))
            driver.manager.plan(step, ahead(ctx))
        driver.manager.admit(step, ctx)
        plans.append(driver.manager.plan(step, ctx)["main"].cpu_indptrs)
    for one, other in zip(*plans, strict=True):
        assert torch.equal(one, other)
