"""Page keys and the index over them."""

import hashlib
import struct

import pytest

from mstar_plugin.kv.pages import PagePool
from mstar_plugin.kv.prefix import (
    EMPTY_ROOT,
    PageItem,
    PrefixIndex,
    cache_root,
    fingerprint,
    page_key,
)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_page_key_is_sha256_over_length_prefixed_parts() -> None:
    ids = struct.pack("<3I", 1, 2, 70000)
    item = struct.pack("<III", 2, 5, 9) + b"cat"
    parts = [b"previous", ids, item]
    expected = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    got = page_key(b"previous", [1, 2, 70000], [PageItem(2, 5, 9, b"cat")])
    assert got == hashlib.sha256(expected).digest()


def test_every_part_of_a_page_changes_its_key() -> None:
    item = PageItem(0, 0, 4, b"dog")
    variants = [
        page_key(b"", [1, 2]),
        page_key(b"x", [1, 2]),
        page_key(b"", [2, 1]),
        page_key(b"", [1, 2, 0]),
        page_key(b"", [1, 2], [item]),
        page_key(b"", [1, 2], [item._replace(start=1)]),
        page_key(b"", [1, 2], [item._replace(earlier=1)]),
        page_key(b"", [1, 2], [item._replace(length=5)]),
        page_key(b"", [1, 2], [item._replace(digest=b"dogs")]),
        page_key(b"", [1, 2], [item, item]),
    ]
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_token_ids_outside_32_bits_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        page_key(b"", [token])


def test_roots_differ_by_every_part_and_separate_caches() -> None:
    roots = {cache_root("model", "NHD", "16"), cache_root("model", "MLA", "16"), cache_root("mod")}
    assert len({fingerprint(root, key(1)) for root in roots}) == 3
    assert cache_root("ab", "c") != cache_root("a", "bc")


def indexed(pool: PagePool, count: int) -> tuple[PrefixIndex, list[int]]:
    """An index over one chain whose pages nobody else owns."""
    index = PrefixIndex(pool)
    pages = pool.acquire(count)
    for number, page in enumerate(pages):
        index.insert(key(number), page, key(number - 1) if number else EMPTY_ROOT)
    pool.release(pages)
    return index, pages


def test_lookup_returns_the_longest_leading_run() -> None:
    index, pages = indexed(PagePool(8), 3)
    assert index.lookup([key(0), key(1), key(9), key(2)]) == pages[:2]
    assert index.lookup([key(9)]) == []


def test_the_first_writer_of_a_key_wins() -> None:
    pool = PagePool(8)
    index, pages = indexed(pool, 1)
    [other] = pool.acquire(1)
    assert not index.insert(key(0), other)
    assert index.lookup([key(0)]) == pages
    assert not pool.is_sealed(other)


def test_eviction_takes_leaves_only_so_a_chain_goes_from_its_end() -> None:
    pool = PagePool(8)
    index, _ = indexed(pool, 3)
    assert index.evict(1) == 1
    assert key(2) not in index and key(1) in index
    assert index.evict(5) == 2
    assert len(index) == 0
    pool.assert_conserved([])


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    pool = PagePool(8)
    index = PrefixIndex(pool)
    pages = pool.acquire(2)
    index.insert(key(1), pages[0])
    index.insert(key(2), pages[1])
    pool.release(pages)
    index.lookup([key(1)])
    index.evict(1)
    assert key(1) in index and key(2) not in index


def test_a_page_somebody_uses_is_not_evicted_and_counts_as_just_used() -> None:
    pool = PagePool(8)
    index = PrefixIndex(pool)
    pages = pool.acquire(2)
    index.insert(key(1), pages[0])
    index.insert(key(2), pages[1])
    pool.release(pages[1:])
    assert index.evict(2) == 1
    assert key(1) in index
    pool.release(pages[:1])
    assert index.evict(2) == 1


def test_a_popular_page_does_not_grow_the_index() -> None:
    index, _ = indexed(PagePool(4), 1)
    for _ in range(5000):
        index.lookup([key(0)])
    assert len(index._leaves) < 100
    assert index.evict(1) == 1


def test_clearing_gives_every_page_back() -> None:
    pool = PagePool(8)
    index, _ = indexed(pool, 3)
    assert index.clear() == 3
    pool.assert_conserved([])
