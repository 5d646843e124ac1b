"""Retention in the manager: the commit rule, its worked series, and the explicit call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar_plugin.kv import retention
from mstar_plugin.kv.config import PrefixSpan, RetentionPolicy, StreamLayout

A = ("a", "main")


def decode(driver: Any, span: int, policy: RetentionPolicy) -> tuple[int, int, int]:
    """One commit under the policy: stored tokens, pages released by it, pages seen by the step."""
    size = driver.manager.config.page_size
    before = driver.manager.released_tokens("a")
    view = driver.run(("a", "main", span), retention={A: policy})["main"].views[0]
    released = (driver.manager.released_tokens("a") - before) // size
    return driver.manager.stored_tokens("a"), released, len(view.page_idxs)


@pytest.mark.parametrize(
    ("size", "prefix", "budget", "span", "series", "peak"),
    [
        (8, 24, 32, 8, [(32, 0), (40, 0), (48, 0), (56, 0), (56, 1), (56, 1)], 8),
        (
            8,
            7,
            24,
            3,
            [(n, 0) for n in range(10, 38, 3)] + [(32, 1), (35, 0), (38, 0), (33, 1), (36, 0)],
            6,
        ),
        (8, 5, 1, 3, [(8, 0), (11, 0), (14, 0), (9, 1), (12, 0), (15, 0), (10, 1), (13, 0)], 3),
        (8, 10, 40, 12, [(22, 0), (34, 0), (46, 0), (50, 1), (54, 1), (50, 2), (54, 1)], 9),
        (128, 7, 384, 256, [(263, 0), (391, 1), (391, 2), (391, 2)], 6),
        (
            128,
            180,
            6240,
            3120,
            [(3300, 0), (6420, 0), (6468, 24), (6516, 24), (6436, 25), (6484, 24)],
            76,
        ),
    ],
)
def test_the_worked_series_come_out(
    make_driver: Any,
    size: int,
    prefix: int,
    budget: int,
    span: int,
    series: list[tuple[int, int]],
    peak: int,
) -> None:
    driver = make_driver(page_size=size, max_num_pages=80)
    driver.ingest("a")
    driver.run(("a", "main", prefix))
    policy = RetentionPolicy(budget, prefix)
    seen = [decode(driver, span, policy) for _ in series]
    assert [(stored, released) for stored, released, _ in seen] == series
    most = max(pages for _, _, pages in seen)
    assert most <= peak
    layout = StreamLayout(
        (PrefixSpan(prefix, prefix, "prefill"),), (("loop", span),), retention=policy
    )
    assert layout.pages({}, size) >= peak


def test_the_eleventh_commit_takes_one_page_out_of_the_middle(make_driver: Any) -> None:
    driver = make_driver(page_size=8)
    driver.ingest("a")
    driver.run(("a", "main", 7))
    policy = RetentionPolicy(24, 7)
    for _ in range(10):
        decode(driver, 3, policy)
    before = driver.run(("a", "main", 0))["main"].views[0]
    assert (before.page_idxs, before.length) == ([1, 2, 3, 4, 5], 37)
    decode(driver, 3, policy)
    assert driver.manager.released_tokens("a") == 8
    step, ctx = driver.declare([("a", "main", 3)])
    driver.manager.admit(step, ctx)
    view = driver.manager.plan(step, ctx)["main"].views[0]
    assert view.page_idxs[:4] == [1, 3, 4, 5]
    assert (view.length, view.start, len(view.page_idxs)) == (35, 0, 5)
    assert view.last_page_len(8) == 3
    assert view.generation != before.generation
    driver.manager.rollback_admit(step, ctx)


def test_nothing_is_released_without_a_policy_without_a_commit_or_by_a_zero_span(
    driver: Any,
) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 40))
    policy = {A: RetentionPolicy(4)}
    driver.run(("a", "main", 4), retention=policy, commit=False)
    driver.run(("a", "main", 0), retention=policy)
    driver.run(("a", "main", 4), retention={("b", "main"): RetentionPolicy(1)})
    assert driver.manager.released_tokens("a") == 0


def test_the_straddling_page_and_the_partial_tail_always_stay(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 5))
    for _ in range(30):
        driver.run(("a", "main", 1), retention={A: RetentionPolicy(1, 5)})
    assert driver.tokens[A][:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(driver.tokens[A]) == 11


def test_the_budget_may_change_but_the_prefix_may_not_until_a_reset(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 30), retention={A: RetentionPolicy(100, 4)})
    driver.run(("a", "main", 1), retention={A: RetentionPolicy(8, 4)})
    assert driver.manager.stored_tokens("a") == 15
    step, ctx = driver.declare([("a", "main", 1)], retention={A: RetentionPolicy(8, 5)})
    driver.manager.admit(step, ctx)
    with pytest.raises(ValueError, match="label 'main' of request 'a' must stay 4.*got 5"):
        driver.manager.commit(step, ctx)
    assert driver.manager.stored_tokens("a") == 15
    driver.manager.rollback_admit(step, ctx)
    driver.manager.reset_request("a")
    driver.tokens[A] = []
    driver.run(("a", "main", 6), retention={A: RetentionPolicy(8, 5)})


def test_a_policy_that_fits_one_stream_is_not_applied_when_another_fails(driver: Any) -> None:
    driver.ingest("a", "b")
    driver.run(("a", "main", 20), ("b", "main", 20))
    policies = {A: RetentionPolicy(4), ("b", "main"): RetentionPolicy(4, 22)}
    step, ctx = driver.declare([("a", "main", 1), ("b", "main", 1)], retention=policies)
    driver.manager.admit(step, ctx)
    driver.manager.plan(step, ctx)
    with pytest.raises(ValueError, match="within the 21 tokens it stores, got 22"):
        driver.manager.commit(step, ctx)
    assert driver.manager.stored_tokens("a") == 20
    driver.manager.remove_request("b")
    driver.forget("b")
    driver.manager.commit(step, ctx)
    assert driver.manager.stored_tokens("a") == 5
    driver.manager.assert_pages_conserved()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(1, 9),
    prefix=st.integers(0, 30),
    budget=st.integers(1, 40),
    spans=st.lists(st.integers(1, 17), max_size=14),
)
def test_any_series_of_commits_releases_what_the_closed_form_says(
    make_driver: Any, size: int, prefix: int, budget: int, spans: list[int]
) -> None:
    driver = make_driver(page_size=size, max_num_pages=600)
    driver.ingest("a")
    policy = RetentionPolicy(budget, prefix)
    total = max(prefix, 1)
    driver.run(("a", "main", total), retention={A: policy})
    layout = StreamLayout(
        (PrefixSpan(total, total, "prefill"),),
        tuple((f"loop{i}", span) for i, span in enumerate(spans)),
        retention=policy,
    )
    for span in spans:
        total += span
        stored, _, pages = decode(driver, span, policy)
        assert stored == retention.resident_tokens(total, budget, prefix, size)
        assert stored + driver.manager.released_tokens("a") == total
        assert pages <= layout.pages({}, size)


def test_releasing_by_hand_keeps_the_prefix_and_the_newest_pages(make_driver: Any) -> None:
    driver = make_driver(page_size=8)
    driver.ingest("a")
    pages = driver.run(("a", "main", 80))["main"].views[0].page_idxs
    assert driver.manager.release("a", "main", 24 + 7, protected_prefix=16) == 24
    del driver.tokens[A][16:40]
    driver.check()
    view = driver.run(("a", "main", 0))["main"].views[0]
    assert view.page_idxs == pages[:2] + pages[5:]
    assert driver.manager.released_tokens("a") == 24


def test_releasing_more_than_there_is_leaves_prefix_and_partial_tail(make_driver: Any) -> None:
    driver = make_driver(page_size=8)
    driver.ingest("a")
    driver.run(("a", "main", 30))
    assert driver.manager.release("a", "main", 1000, protected_prefix=3) == 16
    assert driver.manager.stored_tokens("a") == 14


def test_releasing_refuses_a_prefix_that_is_too_long_or_another(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 30), retention={A: RetentionPolicy(100, 4)})
    with pytest.raises(ValueError, match="within the 30 tokens"):
        driver.manager.release("a", "main", 4, protected_prefix=31)
    with pytest.raises(ValueError, match="must stay 4"):
        driver.manager.release("a", "main", 4, protected_prefix=5)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        driver.manager.release("a", "main", -1, protected_prefix=4)
    with pytest.raises(KeyError, match="not 'uncond'"):
        driver.manager.release("a", "uncond", 4)


def test_releasing_is_the_wrong_moment_while_any_label_is_in_a_step_or_away(
    make_driver: Any,
) -> None:
    driver = make_driver(cpu_offload_pages=20)
    driver.ingest("a")
    driver.run(("a", "main", 30), ("a", "x", 1))
    step, ctx = driver.declare([("a", "x", 1)])
    driver.manager.admit(step, ctx)
    with pytest.raises(RuntimeError, match="at rest"):
        driver.manager.release("a", "main", 4)
    driver.manager.rollback_admit(step, ctx)
    driver.manager.offload("a")
    with pytest.raises(RuntimeError, match="at rest"):
        driver.manager.release("a", "main", 4)
