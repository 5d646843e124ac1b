"""The page pool: ownership, seals and the count that has to come out right."""

import pytest

from mstar_plugin.kv.pages import SINK_PAGE, PagePool


def test_the_sink_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert sorted(pool.acquire(pool.num_usable)) == [1, 2, 3, 4]
    assert not pool.can_acquire(1)
    assert SINK_PAGE == 0


def test_a_page_is_free_again_only_when_its_last_owner_lets_go() -> None:
    pool = PagePool(4)
    [page] = pool.acquire(1)
    pool.retain([page])
    assert pool.release([page]) == 0
    assert pool.num_free == 2
    assert pool.release([page]) == 1
    assert pool.num_free == 3


def test_the_seal_goes_with_the_last_owner() -> None:
    pool = PagePool(3)
    [page] = pool.acquire(1)
    pool.seal(page)
    assert pool.is_sealed(page)
    pool.release([page])
    assert not pool.is_sealed(page)


def test_writable_pages_are_unsealed_and_have_one_owner() -> None:
    pool = PagePool(5)
    own, shared, sealed = pool.acquire(3)
    pool.retain([shared])
    pool.seal(sealed)
    assert pool.writable([own, shared, sealed]) == [own]
    assert pool.num_reclaimable([own, shared, sealed]) == 2


def test_idle_sealed_pages_are_counted_through_every_change_of_ownership() -> None:
    pool = PagePool(4)
    [page] = pool.acquire(1)
    pool.retain([page])
    pool.seal(page)
    assert pool.num_idle_sealed == 0
    pool.release([page])
    assert pool.num_idle_sealed == 1
    pool.retain([page])
    assert pool.num_idle_sealed == 0
    pool.release([page])
    pool.release([page])
    assert pool.num_idle_sealed == 0
    pool.assert_conserved([])


def test_asking_for_more_than_is_free_changes_nothing_and_names_both_numbers() -> None:
    pool = PagePool(4)
    with pytest.raises(RuntimeError, match="needs 5 free pages and 3 are free"):
        pool.acquire(5)
    assert pool.num_free == 3


def test_a_page_without_owner_is_neither_released_retained_nor_sealed() -> None:
    pool = PagePool(4)
    for call in (pool.release, pool.retain):
        for page in (2, SINK_PAGE):
            with pytest.raises(RuntimeError, match="page"):
                call([page])
    with pytest.raises(RuntimeError, match="cannot be sealed"):
        pool.seal(2)


def test_a_pool_needs_a_page_beside_the_sink() -> None:
    with pytest.raises(ValueError, match="at least 2.*got 1"):
        PagePool(1)


@pytest.mark.parametrize(
    ("references", "message"),
    [([], "neither free nor owned"), ([1, 1, 2], "owner counts differ"), ([0, 1, 2], "sink")],
)
def test_conservation_finds_what_is_lost_counted_twice_or_in_the_sink(
    references: list[int], message: str
) -> None:
    pool = PagePool(4)
    pool.acquire(2)
    pool.assert_conserved([1, 2])
    with pytest.raises(AssertionError, match=message):
        pool.assert_conserved(references)
