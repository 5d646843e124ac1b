"""One manager prefills and publishes, another takes the request over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.step import AdmitRuntimeError, AllocationFailed, RequestOffloading

WALKS = {("llm", "prefill"): ["main", "uncond"], ("llm", "decode"): []}


@pytest.fixture
def pair(make_driver: Any) -> tuple[Any, Any]:
    """A publisher with a prefilled request, and a manager that knows the request."""
    source, target = make_driver(), make_driver(max_num_pages=10)
    source.ingest("a", publish_labels_per_node_walk=WALKS)
    source.run(("a", "main", 10), ("a", "uncond", 3), ("a", "scratch", 5))
    target.ingest("a")
    return source, target


def hand_over(source: Any, target: Any, walk: str = "prefill") -> Any:
    published = source.manager.publish("a", "llm", walk)
    outcome = target.manager.admit_retrieve("a", published)
    if outcome.ok and published is not None:
        for label in published.streams:
            target.tokens["a", label] = list(source.tokens["a", label])
    target.check()
    return outcome


def test_the_labels_of_the_walk_arrive_with_their_tokens(pair: tuple[Any, Any]) -> None:
    source, target = pair
    assert hand_over(source, target).ok
    target.run(("a", "main", 1), ("a", "uncond", 1))
    with pytest.raises(KeyError, match="'scratch'"):
        target.manager.stored_tokens("a", "scratch")


def test_a_walk_that_publishes_nothing_hands_over_nothing(pair: tuple[Any, Any]) -> None:
    source, target = pair
    assert source.manager.publish("a", "llm", "decode") is None
    assert source.manager.publish_after_stop("a", "llm", "decode") is None
    assert target.manager.admit_retrieve("a", None).ok


def test_without_a_map_every_label_is_published_after_a_step_and_none_after_the_stop(
    driver: Any,
) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 2), ("a", "x", 2))
    assert set(driver.manager.publish("a", None, None).streams) == {"main", "x"}
    assert driver.manager.publish_after_stop("a", None, None) is None


def test_streams_a_step_sank_are_not_published(driver: Any) -> None:
    driver.ingest("a")
    driver.run(("a", "main", 2), ("a", "x", 2))
    step, _ = driver.declare([("a", "x", 1)], sink=frozenset([("a", "x")]))
    assert set(driver.manager.publish("a", None, None, step).streams) == {"main"}


def test_a_longer_stream_is_continued_and_only_its_new_pages_are_copied(
    pair: tuple[Any, Any],
) -> None:
    source, target = pair
    hand_over(source, target)
    source.run(("a", "main", 7))
    before = target.run(("a", "main", 0))["main"].views[0].page_idxs
    target.manager.layer_view(0)[before[0]] = 555.0
    assert hand_over_unchecked(source, target).ok
    k, _ = target.manager.read_stream("a", "main", 0)
    assert k[4:, 0, 0].tolist() == source.tokens["a", "main"][4:]
    assert torch.all(k[:4] == 555.0)


def hand_over_unchecked(source: Any, target: Any) -> Any:
    outcome = target.manager.admit_retrieve("a", source.manager.publish("a", "llm", "prefill"))
    target.manager.assert_pages_conserved()
    return outcome


def test_what_is_up_to_date_is_left_alone_even_after_it_went_on_here(
    pair: tuple[Any, Any],
) -> None:
    source, target = pair
    hand_over(source, target)
    target.run(("a", "main", 3))
    source.run(("a", "uncond", 2))
    assert hand_over_unchecked(source, target).ok
    target.tokens["a", "uncond"] = list(source.tokens["a", "uncond"])
    target.check()


def test_a_stream_that_went_on_here_and_there_is_refused(pair: tuple[Any, Any]) -> None:
    source, target = pair
    hand_over(source, target)
    target.run(("a", "main", 3))
    source.run(("a", "main", 2))
    outcome = hand_over_unchecked(source, target)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "written to here and there" in outcome.reason.message
    target.check()


def test_a_reset_at_the_publisher_resets_the_stream_here_first(pair: tuple[Any, Any]) -> None:
    source, target = pair
    hand_over(source, target)
    source.manager.reset_request("a")
    source.tokens = {name: [] for name in source.tokens}
    source.run(("a", "main", 2), ("a", "uncond", 9))
    assert hand_over(source, target).ok


def test_released_tokens_and_the_prefix_come_along(pair: tuple[Any, Any]) -> None:
    source, target = pair
    policy = {("a", "main"): RetentionPolicy(4, 3)}
    source.run(("a", "main", 9), retention=policy)
    assert hand_over(source, target).ok
    assert target.manager.released_tokens("a") == 12
    source.run(("a", "main", 9), retention=policy)
    assert hand_over(source, target).ok
    with pytest.raises(ValueError, match="must stay 3"):
        target.manager.release("a", "main", 1, protected_prefix=2)


def test_all_labels_or_none_when_there_is_no_room_and_it_can_be_retried(
    pair: tuple[Any, Any],
) -> None:
    source, target = pair
    target.ingest("b")
    target.run(("b", "main", 26))
    outcome = hand_over(source, target)
    assert isinstance(outcome.reason, AllocationFailed)
    assert outcome.reason.pages_short == 2
    target.manager.remove_request("b")
    target.forget("b")
    assert hand_over(source, target).ok


def test_a_publication_that_is_out_of_date_is_refused(pair: tuple[Any, Any]) -> None:
    source, target = pair
    published = source.manager.publish("a", "llm", "prefill")
    source.manager.reset_request("a")
    outcome = target.manager.admit_retrieve("a", published)
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert "publish it again" in outcome.reason.message
    source.manager.remove_request("a")
    assert not target.manager.admit_retrieve("a", published).ok


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"world_size": 2, "num_kv_heads": 2}, "world size of both managers must be equal"),
        ({"head_dim": 4}, "pages of both managers must be alike"),
        ({"page_size": 8}, "pages of both managers must be alike"),
    ],
)
def test_another_world_size_or_another_page_is_refused_for_good(
    pair: tuple[Any, Any], make_driver: Any, config: dict[str, int], message: str
) -> None:
    source, _ = pair
    target = make_driver(**config)
    target.ingest("a")
    outcome = target.manager.admit_retrieve("a", source.manager.publish("a", "llm", "prefill"))
    assert isinstance(outcome.reason, AdmitRuntimeError)
    assert message in outcome.reason.message


def test_a_request_that_is_away_in_a_step_or_unknown_here_is_not_taken_over(
    pair: tuple[Any, Any], make_driver: Any
) -> None:
    source, _ = pair
    published = source.manager.publish("a", "llm", "prefill")
    target = make_driver(cpu_offload_pages=8)
    assert "ingested" in target.manager.admit_retrieve("a", published).reason.message
    target.ingest("a")
    target.run(("a", "main", 1))
    target.manager.offload("a")
    outcome = target.manager.admit_retrieve("a", published)
    assert isinstance(outcome.reason, RequestOffloading)
    target.manager.reload("a")
    target.manager.admit(*target.declare([("a", "main", 1)]))
    assert "step in flight" in target.manager.admit_retrieve("a", published).reason.message


def test_two_managers_can_take_from_each_other_at_the_same_time(make_driver: Any) -> None:
    drivers = [make_driver(), make_driver()]
    for driver in drivers:
        driver.ingest("a", "b")
    drivers[0].run(("a", "main", 9))
    drivers[1].run(("b", "main", 9))
    published = [
        drivers[0].manager.publish("a", None, None),
        drivers[1].manager.publish("b", None, None),
    ]

    def take(driver: Any, name: str, offer: Any) -> None:
        for _ in range(50):
            assert driver.manager.admit_retrieve(name, offer).ok
            driver.manager.reset_request(name, free=True)

    threads = [
        threading.Thread(target=take, args=(drivers[1], "a", published[0])),
        threading.Thread(target=take, args=(drivers[0], "b", published[1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    for driver in drivers:
        driver.manager.assert_pages_conserved()
