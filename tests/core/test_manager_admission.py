"""Admission of whole requests by their layouts."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.config import KVReqConfig, PrefixSpan, RetentionPolicy, StreamLayout
from mstar_plugin.kv.reservation import (
    BACKFILL_WINDOW,
    AdmissionGate,
    AdmissionPolicy,
    Holding,
    Reservation,
    can_all_finish,
    iterations_left,
    reservation_of,
)
from mstar_plugin.step import AdmitRuntimeError, AllocationFailed


def layout(prompt: int, growth: int = 1, **extra: Any) -> StreamLayout:
    return StreamLayout((PrefixSpan(prompt, prompt, "prefill"),), (("decode", growth),), **extra)


def declared(prompt: int, cap: int, **extra: Any) -> dict[str, Any]:
    return {"kv_layout": {"main": layout(prompt, **extra)}, "loop_caps": {"decode": cap}}


def test_a_reservation_is_the_sum_of_the_labels_bounds() -> None:
    config = KVReqConfig(
        kv_layout={"main": layout(10), "uncond": layout(3, growth=2)}, loop_caps={"decode": 6}
    )
    assert reservation_of(config, 4) == Reservation(3 + 1, 4 + 4, 6)
    assert reservation_of(KVReqConfig(), 4) is None


def test_under_retention_the_window_is_reserved_unless_the_request_is_shorter() -> None:
    policy = RetentionPolicy(16, 4)
    long, short = (
        KVReqConfig(kv_layout={"main": layout(4, retention=policy)}, loop_caps={"decode": cap})
        for cap in (10_000, 3)
    )
    assert reservation_of(long, 4) == Reservation(1, 7, 10_000)
    assert reservation_of(short, 4) == Reservation(1, 2, 3)


def test_iterations_left_follow_what_is_committed() -> None:
    config = KVReqConfig(kv_layout={"main": layout(20, growth=2)}, loop_caps={"decode": 50})
    assert [iterations_left(config, {"main": n}) for n in (0, 20, 60, 120)] == [50, 50, 30, 0]


@pytest.mark.parametrize(
    ("holdings", "finish"),
    [
        ([(2, 8), (2, 8)], True),
        ([(5, 8), (5, 8)], False),
        ([(4, 9), (5, 6)], True),
        ([(4, 10), (5, 6)], True),
        ([(4, 11), (5, 6)], False),
        ([(11, 11)], False),
        ([], True),
    ],
)
def test_requests_can_all_finish_if_some_order_lets_them(
    holdings: list[tuple[int, int]], finish: bool
) -> None:
    assert can_all_finish([Holding(*one) for one in holdings], 10) is finish


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), max_size=4), st.integers(1, 14))
def test_the_order_tried_is_the_best_one(holdings: list[tuple[int, int]], capacity: int) -> None:
    listed = [Holding(held, held + more) for held, more in holdings]

    def ends(order: tuple[Holding, ...]) -> bool:
        free = capacity - sum(one.held for one in order)
        for one in order:
            if free < one.most - one.held:
                return False
            free += one.held
        return free >= 0

    assert can_all_finish(listed, capacity) == any(ends(order) for order in permutations(listed))


def gate(capacity: int, left: dict[str, int] | None = None) -> AdmissionGate:
    return AdmissionGate(
        capacity, AdmissionPolicy.SUM, lambda name: 0, lambda name: (left or {}).get(name, 0)
    )


def test_requests_start_in_order_of_arrival_while_their_bounds_fit() -> None:
    line = gate(10)
    for name, pages in (("a", 6), ("b", 4), ("c", 1)):
        line.enqueue(name, Reservation(1, pages, 100))
    assert [line.enter(name) for name in "abc"] == [True, True, False]
    line.leave("a")
    assert line.enter("c")


def test_a_later_request_passes_only_if_the_first_one_is_not_delayed() -> None:
    line = gate(10, {"a": 50})
    line.enqueue("a", Reservation(1, 6, 50))
    assert line.enter("a")
    line.enqueue("first", Reservation(1, 8, 100))
    line.enqueue("short", Reservation(1, 4, 50))
    line.enqueue("small", Reservation(1, 2, 1000))
    line.enqueue("long", Reservation(1, 3, 51))
    assert not line.enter("first")
    assert not line.enter("long")
    assert line.enter("small")
    assert not line.enter("short")
    line.leave("small")
    assert line.enter("short")


def test_only_a_window_of_requests_may_pass_the_first_one() -> None:
    line = gate(10, {"a": 50})
    line.enqueue("a", Reservation(1, 9, 50))
    assert line.enter("a")
    names = [f"r{i}" for i in range(BACKFILL_WINDOW + 2)]
    line.enqueue(names[0], Reservation(1, 10, 1))
    for name in names[1:]:
        line.enqueue(name, Reservation(1, 1, 1))
    assert not line.enter(names[-1])
    assert line.enter(names[-2])


def test_a_request_larger_than_the_pool_is_failed_and_blocks_nobody(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=11, admission="sum")
    driver.ingest("huge", **declared(8, 40))
    driver.ingest("a", **declared(8, 20))
    reason = driver.refused(("huge", "main", 8))
    assert isinstance(reason, AdmitRuntimeError)
    assert "2 pages more than the 10" in reason.message
    driver.run(("a", "main", 8))


def test_padding_pages_are_not_given_to_requests(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=11, admission="sum", padding_pages=4)
    driver.ingest("a", **declared(8, 20))
    assert isinstance(driver.refused(("a", "main", 8)), AdmitRuntimeError)


def test_a_request_waits_for_its_whole_bound_and_starts_when_another_leaves(
    make_driver: Any,
) -> None:
    driver = make_driver(max_num_pages=11, admission="sum", cpu_offload_pages=8)
    driver.ingest("a", **declared(8, 20))
    driver.ingest("b", **declared(8, 20))
    driver.run(("a", "main", 8))
    reason = driver.refused(("b", "main", 8))
    assert isinstance(reason, AllocationFailed)
    assert (reason.pages_short, reason.request_id) == (4, "b")
    assert driver.manager.offload("a") == 2
    driver.run(("b", "main", 8))
    assert not driver.manager.reload("a")
    driver.manager.remove_request("b")
    driver.forget("b")
    assert driver.manager.reload("a")
    driver.run(("a", "main", 1))


def test_requests_without_layouts_are_not_gated(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=11, admission="peak")
    driver.ingest("a")
    driver.run(("a", "main", 40))


@pytest.mark.parametrize("admission", ["sum", "peak"])
def test_requests_that_grow_together_all_finish(make_driver: Any, admission: str) -> None:
    driver = make_driver(max_num_pages=11, admission=admission)
    left = {f"r{i}": 24 for i in range(5)}
    for name in left:
        driver.ingest(name, **declared(4, 24))
    most_at_once = 0
    for _ in range(600):
        running = [name for name in left if driver.tokens[name, "main"]]
        most_at_once = max(most_at_once, len(running))
        for name in list(left):
            span = 1 if driver.tokens[name, "main"] else 4
            step, ctx = driver.declare([(name, "main", span)])
            if driver.manager.admit(step, ctx).ok:
                driver.finish(step, ctx, driver.manager.plan(step, ctx))
                left[name] -= span == 1
            if not left[name]:
                del left[name]
                driver.manager.remove_request(name)
                driver.forget(name)
        if not left:
            break
    assert not left
    assert most_at_once == (1 if admission == "sum" else 4)


def test_an_unknown_policy_is_refused(make_driver: Any) -> None:
    with pytest.raises(ValueError, match="'largest'"):
        make_driver(admission="largest")
