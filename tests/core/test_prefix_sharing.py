"""Sharing sealed pages between requests of one manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mstar_plugin.kv.chain import MediaItem, prompt_keys
from mstar_plugin.kv.config import PrefixSpan, RetentionPolicy, StreamLayout
from mstar_plugin.step import AllocationFailed

PROMPT = list(range(100, 118))


def keyed(prompt: Sequence[int] = PROMPT, size: int = 4, **extra: Any) -> dict[str, Any]:
    keys, tail, _ = prompt_keys(prompt, size)
    return {
        "prefix_keys": {"main": keys},
        "prefix_tail": {"main": tail},
        "prefix_decode": {"main": "sampled"},
        **extra,
    }


def start(driver: Any, request_id: str, prompt: Sequence[int] = PROMPT, **declared: Any) -> int:
    """Ingest a request with keys and run what of its prompt is not cached."""
    declared = declared or keyed(prompt)
    driver.ingest(request_id, **declared)
    cached: int = driver.manager.resolve_cached_prefix(request_id)
    if cached:
        donor = next(
            tokens
            for (other, _), tokens in driver.tokens.items()
            if other != request_id and len(tokens) >= cached
        )
        driver.tokens[request_id, "main"] = list(donor[:cached])
    driver.run((request_id, "main", len(prompt) - cached))
    return cached


def test_a_second_request_takes_over_the_whole_pages_of_the_same_prompt(driver: Any) -> None:
    assert start(driver, "a") == 0
    assert start(driver, "b") == 16
    views = driver.run(("a", "main", 0), ("b", "main", 0))["main"].views
    assert views[0].page_idxs[:4] == views[1].page_idxs[:4]
    assert views[0].page_idxs[4] != views[1].page_idxs[4]


def test_a_fully_cached_prompt_leaves_tokens_to_run(driver: Any) -> None:
    start(driver, "a", PROMPT[:16])
    assert start(driver, "b", PROMPT[:16]) == 12


def test_a_prompt_shares_only_up_to_the_first_difference(driver: Any) -> None:
    start(driver, "a")
    assert start(driver, "b", [*PROMPT[:9], 7, *PROMPT[10:]]) == 8
    assert start(driver, "c", [7, *PROMPT[1:]]) == 0


def test_shared_pages_outlive_the_request_that_wrote_them(driver: Any) -> None:
    start(driver, "a")
    tokens = list(driver.tokens["a", "main"])
    driver.manager.remove_request("a")
    driver.forget("a")
    driver.manager.assert_pages_conserved()
    driver.ingest("b", **keyed())
    assert driver.manager.resolve_cached_prefix("b") == 16
    driver.tokens["b", "main"] = tokens[:16]
    driver.run(("b", "main", 2))


def test_asking_again_holds_the_pages_once_and_answers_the_same(driver: Any) -> None:
    start(driver, "a")
    driver.ingest("b", **keyed())
    assert [driver.manager.resolve_cached_prefix("b") for _ in range(3)] == [16] * 3
    driver.manager.assert_pages_conserved()
    driver.manager.remove_request("b")
    driver.forget("b")
    driver.manager.assert_pages_conserved()


def test_the_answer_survives_a_refused_and_an_undone_admission(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=9)
    start(driver, "a")
    driver.ingest("b", **keyed())
    driver.ingest("c")
    assert driver.manager.resolve_cached_prefix("b") == 16
    driver.run(("c", "main", 9))
    assert isinstance(driver.refused(("b", "main", 2)), AllocationFailed)
    assert driver.manager.resolve_cached_prefix("b") == 16
    driver.manager.remove_request("c")
    driver.forget("c")
    step, ctx = driver.declare([("b", "main", 2)])
    assert driver.manager.admit(step, ctx).ok
    assert driver.manager.stored_tokens("b") == 16
    driver.manager.rollback_admit(step, ctx)
    driver.manager.assert_pages_conserved()
    assert driver.manager.resolve_cached_prefix("b") == 16
    driver.tokens["b", "main"] = driver.tokens["a", "main"][:16]
    driver.run(("b", "main", 2))


def test_ranks_agree_on_the_shortest_match_in_whole_pages(driver: Any) -> None:
    start(driver, "a")
    driver.ingest("b", **keyed())
    driver.manager.resolve_cached_prefix("b")
    assert driver.manager.apply_cached_prefix("b", "main", 11) == 8
    assert driver.manager.resolve_cached_prefix("b") == 8
    driver.tokens["b", "main"] = driver.tokens["a", "main"][:8]
    driver.run(("b", "main", 10))
    driver.ingest("c", **keyed())
    driver.manager.resolve_cached_prefix("c")
    assert driver.manager.apply_cached_prefix("c", "main", 3) == 0
    driver.run(("c", "main", 18))


def test_a_stream_in_its_first_step_is_not_given_a_prefix_any_more(driver: Any) -> None:
    start(driver, "a")
    driver.ingest("b", **keyed())
    step, ctx = driver.declare([("b", "main", 18)])
    driver.manager.admit(step, ctx)
    assert driver.manager.resolve_cached_prefix("b") == 0
    driver.finish(step, ctx, driver.manager.plan(step, ctx))
    driver.run(("b", "main", 1))


def test_one_lease_serves_several_walks_and_chunks(driver: Any) -> None:
    start(driver, "a")
    driver.ingest("b", **keyed())
    driver.manager.resolve_cached_prefix("b")
    driver.tokens["b", "main"] = driver.tokens["a", "main"][:16]
    driver.run(("b", "main", 0))
    driver.run(("b", "main", 1))
    driver.run(("b", "main", 1))


def test_sampled_ids_extend_the_chain_so_the_next_turn_reuses_the_answer(driver: Any) -> None:
    start(driver, "a")
    for token in (1, 2, 3, 4, 5, 6):
        driver.manager.extend_prefix("a", "main", [token])
        driver.run(("a", "main", 1))
    assert start(driver, "b", [*PROMPT, 1, 2, 3, 4, 5, 6, 50]) == 24
    assert start(driver, "c", [*PROMPT, 1, 9, 3, 4, 5, 6, 50]) == 16


def test_a_decode_whose_ids_are_not_named_ends_the_chain(driver: Any) -> None:
    start(driver, "a")
    driver.run(("a", "main", 1))
    driver.run(("a", "main", 1))
    driver.manager.extend_prefix("a", "main", [1, 2, 3, 4])
    driver.run(("a", "main", 4))
    assert start(driver, "b", [*PROMPT, 1, 2, 3, 4, 5, 6]) == 16


def test_naming_ids_of_a_label_that_does_not_decode_is_refused(driver: Any) -> None:
    driver.ingest("a", **{**keyed(), "prefix_decode": None})
    with pytest.raises(ValueError, match="must be listed in prefix_decode"):
        driver.manager.extend_prefix("a", "main", [1])


def test_a_request_can_opt_out(driver: Any) -> None:
    assert start(driver, "a", **keyed(prefix_cache=False)) == 0
    assert start(driver, "b") == 0
    assert start(driver, "c", **keyed(prefix_cache=False)) == 0


def test_another_walk_than_laid_out_ends_the_chain(driver: Any) -> None:
    layout = {"main": StreamLayout((PrefixSpan(18, 18, "prefill"),), keyed_spans=1)}
    driver.ingest("a", **keyed(kv_layout=layout))
    driver.run(("a", "main", 18), graph_walk="other")
    assert start_cached(driver) == 0
    driver.ingest("b", **keyed(kv_layout=layout))
    driver.run(("b", "main", 18), graph_walk="prefill")
    assert start_cached(driver) == 16


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        ({"prefix_cache": False}, False),
        ({"world_size": 2, "num_kv_heads": 2}, False),
        ({"world_size": 2, "num_kv_heads": 2, "prefix_cache_tp": True}, True),
    ],
)
def test_the_index_is_off_when_told_and_over_several_ranks_unless_told(
    make_driver: Any, config: dict[str, Any], shares: bool
) -> None:
    driver = make_driver(**config)
    start(driver, "a")
    assert (start(driver, "b") > 0) is shares


def test_a_warm_up_indexes_nothing(driver: Any) -> None:
    driver.ingest("a", **keyed())
    driver.run(("a", "main", 18), capture=True)
    assert start(driver, "b") == 0


def test_uncommitted_tokens_are_not_shared(driver: Any) -> None:
    driver.ingest("a", **keyed())
    driver.run(("a", "main", 18), commit=False)
    assert start(driver, "b") == 0


def test_under_a_policy_only_the_protected_prefix_is_shared(driver: Any) -> None:
    driver.ingest("a", **keyed())
    driver.run(("a", "main", 18), retention={("a", "main"): RetentionPolicy(100, 9)})
    assert start(driver, "b") == 8


def test_a_stream_that_released_pages_shares_nothing_from_then_on(driver: Any) -> None:
    start(driver, "a")
    driver.manager.release("a", "main", 8)
    del driver.tokens["a", "main"][:8]
    sampled = list(range(10))
    driver.manager.extend_prefix("a", "main", sampled)
    driver.run(("a", "main", 10))
    driver.ingest("b", **keyed([*PROMPT, *sampled]))
    assert driver.manager.resolve_cached_prefix("b") == 16


def test_a_request_under_a_policy_takes_over_only_what_full_attention_computed(
    driver: Any,
) -> None:
    start(driver, "a")
    layout = StreamLayout(
        (PrefixSpan(18, 18, "prefill"),), retention=RetentionPolicy(5, 4), keyed_spans=1
    )
    assert start(driver, "b", **keyed(kv_layout={"main": layout})) == 8


def test_sealed_pages_are_never_written_again_even_after_a_reset(driver: Any) -> None:
    start(driver, "a")
    pages = driver.run(("a", "main", 0))["main"].views[0].page_idxs
    driver.manager.reset_request("a")
    driver.tokens["a", "main"] = []
    again = driver.run(("a", "main", 18))["main"].views[0].page_idxs
    assert not set(pages[:4]) & set(again)


def test_a_reset_request_is_indexed_and_served_again(driver: Any) -> None:
    start(driver, "a")
    tokens = list(driver.tokens["a", "main"])
    driver.manager.reset_request("a")
    assert driver.manager.resolve_cached_prefix("a") == 16
    driver.tokens["a", "main"] = tokens[:16]
    driver.run(("a", "main", 2))


def test_a_fork_onto_a_stream_with_shared_pages_leaves_them_alone(driver: Any) -> None:
    start(driver, "a")
    driver.run(("a", "x", 7))
    driver.run(("a", "x", 1), post_forks=(("x", "main"),))
    driver.ingest("b", **keyed())
    assert driver.manager.resolve_cached_prefix("b") == 16


def test_a_fork_target_that_fills_keyed_pages_in_the_same_step_is_not_indexed(driver: Any) -> None:
    driver.ingest("a", **keyed())
    driver.run(("a", "x", 7))
    driver.run(("a", "main", 18), ("a", "x", 1), post_forks=(("x", "main"),))
    assert start(driver, "b") == 0


def test_a_copy_of_a_stream_is_not_indexed(driver: Any) -> None:
    declared = keyed()
    declared["prefix_keys"]["copy"] = declared["prefix_keys"]["main"]
    driver.ingest("a", **{**declared, "prefix_keys": {"copy": declared["prefix_keys"]["main"]}})
    driver.run(("a", "main", 18), post_forks=(("main", "copy"),))
    driver.run(("a", "copy", 8))
    assert start(driver, "b") == 0


def test_cached_pages_give_way_when_pages_are_needed(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8)
    start(driver, "a")
    driver.manager.remove_request("a")
    driver.forget("a")
    assert driver.manager.num_free_pages == 3
    driver.ingest("b")
    driver.run(("b", "main", 28))
    assert start_cached(driver) == 0


def start_cached(driver: Any) -> int:
    driver.ingest("probe", **keyed())
    cached: int = driver.manager.resolve_cached_prefix("probe")
    return cached


def test_nothing_is_evicted_for_a_step_that_does_not_fit_anyway(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=10)
    start(driver, "a")
    driver.manager.remove_request("a")
    driver.forget("a")
    driver.ingest("b", "c")
    driver.run(("b", "main", 17))
    assert isinstance(driver.refused(("b", "main", 3), ("c", "main", 17)), AllocationFailed)
    assert start_cached(driver) == 16


def test_a_held_prefix_is_not_evicted(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8)
    start(driver, "a")
    tokens = list(driver.tokens["a", "main"])
    driver.manager.remove_request("a")
    driver.forget("a")
    assert start_cached(driver) == 16
    driver.ingest("b")
    assert isinstance(driver.refused(("b", "main", 28)), AllocationFailed)
    driver.tokens["probe", "main"] = tokens[:16]
    driver.run(("probe", "main", 2))


def test_a_page_evicted_under_a_running_stream_is_offered_again(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=24)
    start(driver, "a")
    driver.ingest("b", **keyed())
    driver.run(("b", "main", 18))
    driver.manager.remove_request("a")
    driver.forget("a")
    driver.ingest("c")
    driver.run(("c", "main", 4 * 18))
    driver.manager.remove_request("c")
    driver.forget("c")
    driver.manager.extend_prefix("b", "main", [1, 2])
    driver.run(("b", "main", 2))
    assert start(driver, "d", [*PROMPT, 1, 2, 3]) == 20


def media(digest: bytes) -> dict[str, Any]:
    """Three ids, a picture of six slots that ends inside the third page, four ids."""
    ids = [1, 2, 3, 50, 51, 52, 53]
    keys, tail, ends = prompt_keys(ids, 4, [MediaItem(3, 6, digest)])
    spans = (
        PrefixSpan(3, 3, "text"),
        PrefixSpan(6, 1, "image", digest=digest, end_key=ends[9]),
        PrefixSpan(4, 4, "text"),
    )
    return {
        "prefix_keys": {"main": keys},
        "prefix_tail": {"main": tail},
        "kv_layout": {"main": StreamLayout(spans, keyed_spans=3)},
    }


def run_media(driver: Any, request_id: str, cached: int = 0) -> None:
    for walk, end, length in (("text", 3, 3), ("image", 9, 6), ("text", 13, 4)):
        if end > cached:
            span = min(length, end - cached)
            driver.run((request_id, "main", span), graph_walk=walk)


def test_pages_with_the_same_picture_are_shared_and_with_another_are_not(driver: Any) -> None:
    driver.ingest("a", **media(b"cat"))
    run_media(driver, "a")
    driver.ingest("b", **media(b"cat"))
    assert driver.manager.resolve_cached_prefix("b") == 12
    driver.ingest("c", **media(b"dog"))
    assert driver.manager.resolve_cached_prefix("c") == 0


def test_a_picture_that_ends_inside_a_page_is_taken_over_as_a_copy(driver: Any) -> None:
    driver.ingest("a", **media(b"cat"))
    run_media(driver, "a")
    other = media(b"cat")
    ids = [1, 2, 3, 60, 61]
    keys, tail, ends = prompt_keys(ids, 4, [MediaItem(3, 6, b"cat")])
    spans = (*other["kv_layout"]["main"].spans[:2], PrefixSpan(2, 2, "text"))
    driver.ingest(
        "b",
        prefix_keys={"main": keys},
        prefix_tail={"main": tail},
        kv_layout={"main": StreamLayout(spans, keyed_spans=3)},
    )
    assert driver.manager.resolve_cached_prefix("b") == 9
    driver.tokens["b", "main"] = driver.tokens["a", "main"][:9]
    driver.run(("b", "main", 2), graph_walk="text")
    views = driver.run(("a", "main", 0), ("b", "main", 0))["main"].views
    assert views[0].page_idxs[:2] == views[1].page_idxs[:2]
    assert views[0].page_idxs[2] != views[1].page_idxs[2]


def test_a_held_copy_survives_a_refusal_and_a_rollback(make_driver: Any) -> None:
    driver = make_driver(max_num_pages=8)
    driver.ingest("a", **media(b"cat"))
    run_media(driver, "a")
    driver.manager.reset_request("a")
    driver.tokens["a", "main"] = []
    driver.manager.assert_pages_conserved()
    driver.ingest("b", **media(b"cat"))
    driver.manager.resolve_cached_prefix("b")
    assert driver.manager.apply_cached_prefix("b", "main", 9) == 8
    step, ctx = driver.declare([("b", "main", 5)], graph_walk="image")
    assert driver.manager.admit(step, ctx).ok
    driver.manager.rollback_admit(step, ctx)
    driver.manager.assert_pages_conserved()
    driver.manager.remove_request("b")
    driver.manager.assert_pages_conserved()


def test_clearing_the_index_forgets_every_page(driver: Any) -> None:
    start(driver, "a")
    driver.manager.clear_prefix_cache()
    driver.manager.assert_pages_conserved()
    assert start_cached(driver) == 0
