"""Moving requests to host memory and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mstar_plugin.kv import offload
from mstar_plugin.kv.chain import prompt_keys
from mstar_plugin.kv.config import KVLayout, RetentionPolicy
from mstar_plugin.step import AllocationFailed, RequestOffloading


@pytest.fixture
def moving(make_driver: Any) -> Any:
    return make_driver(max_num_pages=16, cpu_offload_pages=12)


def test_every_label_leaves_the_device_and_comes_back(moving: Any) -> None:
    moving.ingest("a", "b")
    moving.run(("a", "main", 7), ("a", "uncond", 5), ("b", "main", 9))
    assert moving.manager.offload("a") == 4
    assert moving.manager.is_offloaded("a") and not moving.manager.is_offloaded("b")
    moving.check()
    moving.run(("b", "main", 30))
    moving.manager.remove_request("b")
    moving.forget("b")
    assert moving.manager.reload("a")
    moving.check()
    moving.run(("a", "main", 1), ("a", "uncond", 1))


def test_a_step_of_an_offloaded_request_asks_for_its_return(moving: Any) -> None:
    moving.ingest("a")
    moving.run(("a", "main", 7))
    moving.manager.offload("a")
    for label in ("main", "new"):
        reason = moving.refused(("a", label, 1))
        assert isinstance(reason, RequestOffloading)
        assert (reason.label, reason.request_id) == (label, "a")


def test_there_is_nothing_to_offload_twice_for_nobody_or_without_a_host_pool(
    moving: Any, make_driver: Any
) -> None:
    moving.ingest("a", "empty")
    moving.run(("a", "main", 7))
    assert moving.manager.offload("a") == 2
    assert [moving.manager.offload(name) for name in ("a", "empty", "ghost")] == [0, 0, 0]
    plain = make_driver()
    plain.ingest("a")
    plain.run(("a", "main", 7))
    assert plain.manager.offload("a") == 0
    assert not plain.manager.supports_eviction


def test_offloading_is_refused_while_a_step_is_in_flight(moving: Any) -> None:
    moving.ingest("a")
    moving.run(("a", "main", 7))
    step, ctx = moving.declare([("a", "main", 1)])
    moving.manager.admit(step, ctx)
    assert moving.manager.offload("a") == 0
    moving.finish(step, ctx, moving.manager.plan(step, ctx))
    assert moving.manager.offload("a") == 2


def test_all_labels_or_none_when_the_host_pool_is_short(make_driver: Any) -> None:
    driver = make_driver(cpu_offload_pages=3)
    driver.ingest("a")
    driver.run(("a", "main", 7), ("a", "uncond", 8))
    assert driver.manager.offload("a") == 0
    driver.check()


def test_reload_waits_for_room_and_changes_nothing_without(moving: Any) -> None:
    moving.ingest("a", "b")
    moving.run(("a", "main", 20))
    moving.manager.offload("a")
    moving.run(("b", "main", 4 * 11))
    assert not moving.manager.reload("a")
    moving.check()
    moving.manager.remove_request("b")
    moving.forget("b")
    assert moving.manager.reload("a")
    moving.check()


def test_reload_evicts_cached_pages_if_it_must(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8, cpu_offload_pages=8)
    keys, tail, _ = prompt_keys(list(range(17)), 4)
    driver.ingest("a")
    driver.run(("a", "main", 8))
    driver.manager.offload("a")
    driver.ingest("b", prefix_keys={"main": keys}, prefix_tail={"main": tail})
    driver.run(("b", "main", 17))
    driver.manager.remove_request("b")
    driver.forget("b")
    driver.ingest("c")
    driver.run(("c", "main", 8))
    assert driver.manager.num_free_pages == 1
    assert driver.manager.reload("a")
    driver.check()


def test_uncommitted_pages_are_freed_and_not_copied(moving: Any) -> None:
    moving.ingest("a")
    moving.run(("a", "main", 5))
    moving.run(("a", "main", 12), commit=False)
    assert moving.manager.offload("a") == 5
    moving.manager.reload("a")
    assert moving.manager.num_free_pages == 13
    moving.check()


def test_shared_pages_do_not_count_as_freed(make_driver: Any) -> None:
    driver = make_driver(cpu_offload_pages=8)
    keys, tail, _ = prompt_keys(list(range(17)), 4)
    driver.ingest("a", prefix_keys={"main": keys}, prefix_tail={"main": tail})
    driver.run(("a", "main", 17))
    assert driver.manager.get_offload_priority("a") == 1.0
    assert driver.manager.offload("a") == 1
    driver.manager.assert_pages_conserved()
    driver.manager.reload("a")
    driver.run(("a", "main", 3))


def test_priorities_follow_the_pages_that_would_be_freed(moving: Any) -> None:
    moving.ingest("a", "b", "away", "busy")
    moving.run(("a", "main", 5), ("b", "main", 9), ("away", "main", 3), ("busy", "main", 9))
    moving.manager.offload("away")
    moving.manager.admit(*moving.declare([("busy", "main", 1)]))
    ranked = {n: moving.manager.get_offload_priority(n) for n in ("a", "b", "away", "busy", "no")}
    assert ranked == {"a": 2.0, "b": 3.0, "away": 0.0, "busy": 0.0, "no": 0.0}


def test_what_was_released_and_protected_survives_but_the_policy_does_not(moving: Any) -> None:
    moving.ingest("a")
    policy = {("a", "main"): RetentionPolicy(8, 3)}
    moving.run(("a", "main", 24), retention=policy)
    moving.manager.offload("a")
    moving.manager.reload("a")
    moving.check()
    assert moving.manager.released_tokens("a") == 12
    moving.run(("a", "main", 8))
    assert moving.manager.released_tokens("a") == 12
    step, ctx = moving.declare([("a", "main", 1)], retention={("a", "main"): RetentionPolicy(8, 4)})
    moving.manager.admit(step, ctx)
    with pytest.raises(ValueError, match="must stay 3"):
        moving.manager.commit(step, ctx)


def test_the_generation_changes_on_the_way_out_and_on_the_way_back(moving: Any) -> None:
    moving.ingest("a")
    moving.run(("a", "main", 7))
    seen = {moving.run(("a", "main", 0))["main"].views[0].generation}
    for _ in range(2):
        moving.manager.offload("a")
        moving.manager.reload("a")
        seen.add(moving.run(("a", "main", 0))["main"].views[0].generation)
    assert len(seen) == 3


@pytest.mark.parametrize("free", [True, False])
def test_an_offloaded_request_can_be_reset_and_removed(moving: Any, free: bool) -> None:
    moving.ingest("a", "b")
    moving.run(("a", "main", 7), ("b", "main", 7))
    moving.manager.offload("a")
    moving.manager.offload("b")
    moving.manager.remove_request("b")
    moving.forget("b")
    moving.manager.reset_request("a", free=free)
    moving.tokens["a", "main"] = []
    moving.check()
    moving.run(("a", "main", 3))


def test_latent_pages_move_as_well(make_driver: Any) -> None:
    driver = make_driver(
        layout=KVLayout.MLA, kv_lora_rank=1, qk_rope_head_dim=1, cpu_offload_pages=8
    )
    driver.ingest("a")
    driver.run(("a", "main", 7))
    driver.manager.offload("a")
    driver.manager.reload("a")
    driver.check()


class Copying:
    """Offloads of request "a" that stand still in their copy until they are told to go on."""

    def __init__(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._driver = driver
        self._gates: list[tuple[threading.Event, threading.Event]] = []
        self._store = offload.HostPool.store
        copying = self
        monkeypatch.setattr(
            offload.HostPool, "store", lambda pool, *pages: copying._wait(pool, *pages)
        )

    def _wait(self, pool: offload.HostPool, *pages: list[int]) -> None:
        arrived, resume = self._gates[-1]
        arrived.set()
        assert resume.wait(20)
        self._store(pool, *pages)

    def begin(self) -> Callable[[], int]:
        """Start an offload; call the result to let it finish and get what it returned."""
        arrived, resume = threading.Event(), threading.Event()
        self._gates.append((arrived, resume))
        freed: list[int] = []
        thread = threading.Thread(target=lambda: freed.append(self._driver.manager.offload("a")))
        thread.start()
        assert arrived.wait(20)

        def end() -> int:
            resume.set()
            thread.join(20)
            return freed[0]

        return end


@pytest.fixture
def copying(moving: Any, monkeypatch: pytest.MonkeyPatch) -> Copying:
    moving.ingest("a", "b")
    moving.run(("a", "main", 7))
    return Copying(moving, monkeypatch)


def test_a_step_that_arrives_during_the_copy_is_told_to_come_back(
    moving: Any, copying: Copying
) -> None:
    end = copying.begin()
    assert isinstance(moving.refused(("a", "main", 1)), RequestOffloading)
    assert not moving.manager.reload("a")
    assert moving.manager.offload("a") == 0
    moving.run(("b", "main", 3))
    assert end() == 2
    assert moving.manager.reload("a")
    moving.check()


def test_a_reset_during_the_copy_wins(moving: Any, copying: Copying) -> None:
    end = copying.begin()
    moving.manager.reset_request("a")
    moving.tokens["a", "main"] = []
    moving.run(("a", "main", 3))
    assert end() == 0
    assert not moving.manager.is_offloaded("a")
    moving.check()
    moving.run(("a", "main", 3))


def test_a_removal_during_the_copy_wins(moving: Any, copying: Copying) -> None:
    end = copying.begin()
    moving.manager.remove_request("a")
    moving.forget("a")
    moving.ingest("a")
    moving.run(("a", "main", 2))
    assert end() == 0
    moving.check()


def test_an_overtaken_offload_leaves_a_later_one_alone(moving: Any, copying: Copying) -> None:
    end_first = copying.begin()
    moving.manager.reset_request("a")
    moving.tokens["a", "main"] = []
    moving.run(("a", "main", 9))
    end_second = copying.begin()
    assert end_first() == 0
    assert isinstance(moving.refused(("a", "main", 1)), RequestOffloading)
    assert end_second() == 3
    assert moving.manager.reload("a")
    moving.check()


def test_an_error_during_the_copy_leaves_the_request_on_the_device(
    moving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving.ingest("a")
    moving.run(("a", "main", 7))

    def fail(*_: Any) -> None:
        raise MemoryError("no staging memory")

    with monkeypatch.context() as patch:
        patch.setattr(offload.HostPool, "store", fail)
        with pytest.raises(MemoryError):
            moving.manager.offload("a")
    moving.check()
    moving.run(("a", "main", 1))
    assert moving.manager.offload("a") == 2


def test_many_threads_moving_and_stepping_lose_no_page_and_no_token(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=12, cpu_offload_pages=24)
    names = ["a", "b", "c"]
    driver.ingest(*names)
    manager, stop, errors = driver.manager, threading.Event(), []

    def mover(name: str) -> None:
        try:
            while not stop.is_set():
                manager.offload(name)
                manager.reload(name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=mover, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for turn in range(60):
        step, ctx = driver.declare([(names[turn % 3], "main", 1)])
        while not (outcome := manager.admit(step, ctx)).ok:
            assert isinstance(outcome.reason, RequestOffloading | AllocationFailed)
            manager.reload(names[turn % 3])
        driver.finish_unchecked(step, ctx, manager.plan(step, ctx))
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not errors
    for name in names:
        for other in names:
            if other != name:
                manager.offload(other)
        manager.reload(name)
        driver.check_stream(name, "main", driver.tokens[name, "main"])
    manager.assert_pages_conserved()
    assert sum(len(tokens) for tokens in driver.tokens.values()) == 60
