"""Forks before the forward and after the commit."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.step import AdmitRuntimeError, AllocationFailed

FORK = (("main", "copy"),)


def test_a_pre_fork_is_made_before_the_views_so_the_step_sees_it(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    views = driver.run(("a", "main", 3), ("a", "copy", 2), pre_forks=FORK)["copy"].views
    assert (views[0].length, views[0].to_compute) == (8, 2)


def test_a_post_fork_copies_what_the_commit_left(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    policy = {("a", "main"): RetentionPolicy(4)}
    driver.run(("a", "main", 7), post_forks=FORK, retention=policy)
    assert driver.manager.stored_tokens("a", "copy") == 5
    assert driver.manager.released_tokens("a", "copy") == 8


def test_without_a_commit_there_is_no_post_fork_and_no_page_for_one(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6), commit=False, post_forks=FORK)
    assert driver.manager.num_free_pages == 63 - 2
    with pytest.raises(KeyError, match="'copy'"):
        driver.manager.stored_tokens("a", "copy")


def test_a_fork_replaces_what_the_target_held_and_changes_its_generation(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6), ("a", "copy", 15))
    before = driver.run(("a", "copy", 0))["copy"].views[0]
    driver.run(("a", "main", 1), pre_forks=FORK)
    after = driver.run(("a", "copy", 0))["copy"].views[0]
    assert after.length == 6
    assert after.generation != before.generation


def test_forks_are_made_in_order_so_a_copy_can_be_copied(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    driver.run(("a", "main", 1), pre_forks=(("main", "x"), ("x", "y")), post_forks=(("main", "x"),))
    assert driver.manager.stored_tokens("a", "x") == 7
    assert driver.manager.stored_tokens("a", "y") == 6


def test_fork_rids_limits_forks_to_some_requests_of_the_batch(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(
        ("a", "main", 6), ("b", "main", 3), post_forks=FORK, fork_rids=frozenset(["b", "other"])
    )
    assert driver.manager.stored_tokens("b", "copy") == 3
    with pytest.raises(KeyError, match="'copy'"):
        driver.manager.stored_tokens("a", "copy")


def test_padding_rows_and_sinks_never_fork(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(
        ("a", "main", 6),
        ("b", "main", 6),
        ("pad", "main", 1),
        request_ids=("a", "b"),
        padded_request_ids=("a", "b", "pad"),
        sink=frozenset([("b", "main")]),
        post_forks=FORK,
    )
    assert driver.manager.stored_tokens("a", "copy") == 6
    with pytest.raises(KeyError, match="'copy'"):
        driver.manager.stored_tokens("b", "copy")


def test_a_post_fork_needs_pages_for_the_source_as_it_grows(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8)
    driver.ingest("a")
    driver.run(("a", "main", 12))
    reason = driver.refused(("a", "main", 5), post_forks=FORK)
    assert isinstance(reason, AdmitRuntimeError)
    assert "10 pages at once and the pool has 7" in reason.message


def test_a_pre_fork_needs_pages_for_the_source_as_it_is(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8)
    driver.ingest("a", "b")
    driver.run(("a", "main", 12), ("b", "main", 5))
    reason = driver.refused(("a", "main", 0), pre_forks=FORK)
    assert isinstance(reason, AllocationFailed)
    assert (reason.pages_short, reason.label) == (1, "copy")
    driver.manager.remove_request("b")
    driver.forget("b")
    driver.run(("a", "main", 0), pre_forks=FORK)


@pytest.mark.parametrize("fork", [("main", "main"), ("nothing", "copy")])
def test_a_fork_from_nothing_or_onto_itself_is_refused_for_good(
    driver: Any, fork: tuple[str, str]
) -> None:
    driver.ingest("a")
    reason = driver.refused(("a", "main", 1), pre_forks=(fork,))
    assert isinstance(reason, AdmitRuntimeError)
    assert "copy an open label to another one" in reason.message


def test_a_copy_keeps_its_prefix_and_has_to_declare_its_policy_again(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 30), retention={("a", "main"): RetentionPolicy(12, 5)})
    driver.run(("a", "main", 1), post_forks=FORK)
    driver.run(("a", "copy", 8))
    assert driver.manager.released_tokens("a", "copy") == 12
    step, ctx = driver.declare(
        [("a", "copy", 1)], retention={("a", "copy"): RetentionPolicy(12, 6)}
    )
    driver.manager.admit(step, ctx)
    with pytest.raises(ValueError, match="must stay 5"):
        driver.manager.commit(step, ctx)


def test_a_rollback_before_the_plan_undoes_the_target(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    step, ctx = driver.declare([("a", "main", 9)], pre_forks=FORK)
    assert driver.manager.admit(step, ctx).ok
    driver.manager.rollback_admit(step, ctx)
    driver.check()
    assert driver.manager.num_free_pages == 63 - 2


def test_a_rollback_after_the_plan_keeps_the_copy_that_was_made(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 6))
    step, ctx = driver.declare([("a", "main", 9)], pre_forks=FORK)
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    driver.manager.rollback_admit(step, ctx)
    driver.tokens["a", "copy"] = list(driver.tokens["a", "main"])
    driver.check()
