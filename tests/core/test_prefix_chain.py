"""Naming a prompt's pages, and following a stream from there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.chain import KeyChain, MediaItem, prompt_keys
from mstar_plugin.kv.config import PrefixSpan
from mstar_plugin.kv.prefix import EMPTY_ROOT, PageItem, page_key


def ids_span(length: int, walk: str = "prefill") -> PrefixSpan:
    return PrefixSpan(length, length, walk)


def test_a_prompt_has_one_key_per_page_and_a_tail_behind_the_whole_ones() -> None:
    ids = list(range(10))
    keys, tail, end_keys = prompt_keys(ids, 4)
    first = page_key(EMPTY_ROOT, ids[:4])
    second = page_key(first, ids[4:8])
    assert keys == [first, second, page_key(second, ids[8:])]
    assert tail == [8, 9]
    assert end_keys == {}


def test_a_prompt_that_ends_on_a_page_has_no_tail() -> None:
    assert prompt_keys(list(range(8)), 4)[1] == []


def test_an_item_that_crosses_pages_is_told_apart_by_where_it_lies() -> None:
    item = MediaItem(start=2, length=6, digest=b"picture")
    keys, tail, end_keys = prompt_keys([1, 2, 3], 5, [item])
    first = page_key(EMPTY_ROOT, [1, 2], [PageItem(2, 0, 6, b"picture")])
    assert keys == [first, page_key(first, [3], [PageItem(0, 3, 6, b"picture")])]
    assert tail == [3]
    assert end_keys == {8: page_key(first, [], [PageItem(0, 3, 6, b"picture")])}


def test_an_item_that_ends_on_a_page_boundary_has_no_end_key() -> None:
    assert prompt_keys([1, 2], 4, [MediaItem(2, 6, b"x")]).end_keys == {}


def test_equal_prompts_with_different_pictures_share_only_the_pages_before() -> None:
    keys = [prompt_keys([1] * 12, 4, [MediaItem(5, 4, d)]).keys for d in (b"cat", b"dog")]
    assert keys[0][0] == keys[1][0]
    assert not set(keys[0][1:]) & set(keys[1][1:])


@given(st.lists(st.integers(0, 99), max_size=30), st.lists(st.integers(0, 99), max_size=30))
def test_decoding_names_pages_as_a_prompt_of_the_same_tokens_would(
    prompt: list[int], sampled: list[int]
) -> None:
    keys, tail, _ = prompt_keys(prompt, 4)
    chain = KeyChain(keys, 4, tail)
    for token in sampled:
        assert chain.extend([token])
    whole = (len(prompt) + len(sampled)) // 4
    expected = prompt_keys(prompt + sampled, 4).keys[:whole]
    assert [chain.key(page) for page in range(whole)] == expected
    assert chain.key(whole) is None
    assert chain.covered == len(prompt) + len(sampled)


def test_a_page_with_the_end_of_a_picture_is_named_once_sampled_ids_fill_it() -> None:
    item = MediaItem(2, 4, b"cat")
    keys, tail, _ = prompt_keys([1, 2, 3], 4, [item])
    spans = [ids_span(2), PrefixSpan(4, 1, "image", digest=b"cat"), ids_span(1)]
    chain = KeyChain(keys, 4, tail, spans)
    assert chain.covered == 7
    chain.extend([9])
    assert chain.key(1) == prompt_keys([1, 2, 3, 9], 4, [item]).keys[1]


def test_a_lookup_leaves_at_least_one_token_to_run() -> None:
    assert len(KeyChain(prompt_keys([1] * 8, 4).keys, 4, []).lookup_keys()) == 1
    assert len(KeyChain(prompt_keys([1] * 9, 4).keys, 4, [1]).lookup_keys()) == 2


def test_writes_are_accepted_only_from_the_walk_that_lays_them_out() -> None:
    keys = prompt_keys([1] * 8, 4).keys
    chain = KeyChain(keys, 4, [], [ids_span(5, "text"), ids_span(3, "more")])
    assert chain.follow(0, 5, "text")
    assert not chain.follow(0, 6, "text")
    assert chain.follow(5, 3, "more")
    assert chain.follow(8, 1, "decode")
    assert chain.follow(0, 8, None)


def test_a_write_beyond_what_is_covered_is_refused() -> None:
    chain = KeyChain(prompt_keys([1] * 6, 4).keys, 4, [1, 1])
    assert chain.follow(6, 1, None)
    assert not chain.follow(7, 1, None)


def test_without_the_tail_only_whole_pages_are_covered_and_nothing_can_follow() -> None:
    chain = KeyChain(prompt_keys([1] * 6, 4).keys, 4)
    assert chain.covered == 4
    assert not chain.extend([5])


def test_a_write_of_tokens_the_chain_was_not_told_about_stops_it_from_growing() -> None:
    keys, tail, _ = prompt_keys([1, 2, 3], 4, [MediaItem(2, 4, b"cat")])
    chain = KeyChain(keys, 4, tail)
    assert chain.covered == 5
    assert chain.follow(0, 7, None)
    assert not chain.extend([8, 9])


def test_spans_behind_the_keyed_ones_stop_the_chain_at_them() -> None:
    keys, tail, _ = prompt_keys([1] * 6, 4)
    chain = KeyChain(keys, 4, tail, [ids_span(6), ids_span(5)], keyed_spans=1)
    assert chain.covered == 6
    assert not chain.extend([5])


def test_a_wrong_number_of_keys_is_refused_with_the_right_one() -> None:
    with pytest.raises(ValueError, match="one key per page, 3 for the 9 tokens.*got 2"):
        KeyChain([b"a", b"b"], 4, [], [ids_span(9)])
