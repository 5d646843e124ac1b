"""The closed form of retention against the commit rule applied commit by commit."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.retention import (
    dense_tokens,
    first_release,
    max_resident_pages,
    protected_pages,
    released_pages,
    resident_tokens,
    visible_positions,
)

policies = st.tuples(st.integers(1, 80), st.integers(0, 60), st.integers(1, 17))


@dataclass
class Stream:
    """A stream under the commit rule: the positions on each of its pages, and what was released."""

    budget: int
    prefix: int
    page_size: int
    positions: list[int] = field(default_factory=list)
    total: int = 0
    released: int = 0

    def commit(self, span: int) -> int:
        """Add `span` tokens, then release; returns the pages in use before the release."""
        self.positions += range(self.total, self.total + span)
        self.total += span
        stored, size = len(self.positions), self.page_size
        pages_in_step = -(-stored // size)
        excess = stored - self.prefix - self.budget
        if span and stored >= self.prefix and excess > 0:
            first = -(-self.prefix // size)
            num_pages = max(0, min(excess // size, stored // size - first))
            del self.positions[first * size : (first + num_pages) * size]
            self.released += num_pages
        return pages_in_step


@pytest.mark.parametrize(
    ("page_size", "prefix", "budget", "span", "series", "peak"),
    [
        (8, 24, 32, 8, "32 40 48 56 56(1) 56(1) 56(1)", 8),
        (8, 7, 24, 3, "10 13 16 19 22 25 28 31 34 37 32(1) 35 38 33(1) 36", 6),
        (8, 5, 1, 3, "8 11 14 9(1) 12 15 10(1) 13", 3),
        (8, 10, 40, 12, "22 34 46 50(1) 54(1) 50(2) 54(1)", 9),
        (128, 7, 384, 256, "263 391(1) 391(2) 391(2)", 6),
        (128, 180, 6240, 3120, "3300 6420 6468(24) 6516(24) 6436(25) 6484(24)", 76),
    ],
)
def test_worked_series_by_commits_and_in_closed_form(
    page_size: int, prefix: int, budget: int, span: int, series: str, peak: int
) -> None:
    stream = Stream(budget, prefix, page_size)
    stream.commit(prefix)
    total, seen_peak = prefix, 0
    for value in series.split():
        stored, _, released = value.rstrip(")").partition("(")
        before = stream.released
        seen_peak = max(seen_peak, stream.commit(span))
        total += span
        assert len(stream.positions) == int(stored)
        assert stream.released - before == int(released or 0)
        assert released_pages(total, budget, prefix, page_size) == stream.released
        assert resident_tokens(total, budget, prefix, page_size) == int(stored)
    assert seen_peak <= peak


def test_worked_prefix_page_that_straddles() -> None:
    """P=7, S=128: the first 121 generated tokens share the prefix's page and stay for ever."""
    ranges = visible_positions(10**6, context_budget=384, protected_prefix=7, page_size=128)
    assert ranges[0] == range(0, 128)
    assert ranges[1].stop == 10**6 + 1


@pytest.mark.parametrize(("stored", "expected"), [(38, 0), (39, 1), (46, 1), (47, 2)])
def test_worked_release_points(stored: int, expected: int) -> None:
    assert released_pages(stored, 24, 7, 8) == expected


def test_worked_sizes() -> None:
    assert protected_pages(7, 8) == 1
    assert dense_tokens(24, 7, 8) == 31
    assert first_release(24, 7, 8) == 39
    assert max_resident_pages(128, 32, 32, 64) == 8
    assert visible_positions(40, 24, 7, 8) == [range(0, 8), range(16, 41)]
    assert visible_positions(3, 24, 7, 8) == [range(0, 4)]
    assert visible_positions(40, 8, 0, 8) == [range(32, 41)]


@given(policy=policies, spans=st.lists(st.integers(0, 90), max_size=25))
def test_the_closed_form_equals_any_series_of_commits(
    policy: tuple[int, int, int], spans: list[int]
) -> None:
    budget, prefix, page_size = policy
    stream = Stream(budget, prefix, page_size)
    for span in [prefix, *spans]:
        stream.commit(span)
        assert released_pages(stream.total, budget, prefix, page_size) == stream.released
        visible = visible_positions(stream.total, budget, prefix, page_size)
        assert [p for part in visible for p in part] == [*stream.positions, stream.total]


@given(policy=policies, spans=st.lists(st.integers(0, 90), max_size=25))
def test_the_page_bound_is_never_exceeded(policy: tuple[int, int, int], spans: list[int]) -> None:
    budget, prefix, page_size = policy
    stream = Stream(budget, prefix, page_size)
    stream.commit(prefix)
    for span in spans:
        in_flight = max_resident_pages(budget, prefix, page_size, span)
        assert stream.commit(span) <= in_flight
        assert len(stream.positions) < dense_tokens(budget, prefix, page_size) + page_size


@given(policy=policies, stored=st.integers(0, 400))
def test_releases_grow_one_page_at_a_time_and_start_where_announced(
    policy: tuple[int, int, int], stored: int
) -> None:
    budget, prefix, page_size = policy
    now = released_pages(stored, budget, prefix, page_size)
    assert released_pages(stored + 1, budget, prefix, page_size) - now in (0, 1)
    assert (now > 0) == (stored >= first_release(budget, prefix, page_size))


@given(policy=policies, stored=st.integers(0, 400))
def test_the_prefix_and_a_budget_behind_it_are_always_visible(
    policy: tuple[int, int, int], stored: int
) -> None:
    budget, prefix, page_size = policy
    visible = {p for part in visible_positions(stored, *policy) for p in part}
    assert set(range(min(prefix, stored))) <= visible
    behind = sum(prefix <= position < stored for position in visible)
    assert behind >= min(budget, stored - prefix)
    assert len(visible) == resident_tokens(stored, budget, prefix, page_size) + 1


@given(policy=policies, in_flight=st.integers(0, 90))
def test_the_page_bound_is_reached(policy: tuple[int, int, int], in_flight: int) -> None:
    budget, prefix, page_size = policy
    most = dense_tokens(budget, prefix, page_size) + page_size - 1
    assert resident_tokens(most, budget, prefix, page_size) == most
    needed = -(-(most + in_flight) // page_size)
    assert max_resident_pages(budget, prefix, page_size, in_flight) - needed in (0, 1)
