"""How much a stream will hold: worked numbers, and the bound against simulated commits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mstar_plugin.kv.config import PrefixSpan, RetentionPolicy, StreamLayout

DECODE = (("decode", 1),)


def ids(length: int, advance: int | None = None, scratch: int = 0) -> PrefixSpan:
    return PrefixSpan(length, length if advance is None else advance, "walk", scratch)


PROMPT = (ids(300), ids(1024, 1), ids(20))
VIDEO = StreamLayout((ids(180),), (("win", 3120),))
ROLLING = StreamLayout((ids(180),), (("win", 3120),), retention=RetentionPolicy(6240, 180))


@pytest.mark.parametrize(
    ("layout", "caps", "positions", "slots", "pages"),
    [
        (StreamLayout(PROMPT, DECODE), {"decode": 500}, 821, 1844, 15),
        (StreamLayout(PROMPT, DECODE, scratch=256), {"decode": 0}, 321, 1600, 13),
        (VIDEO, {"win": 6}, 18900, 18900, 148),
        (ROLLING, {"win": 6}, 18900, 18900, 76),
        (ROLLING, {"win": 1000}, 3120180, 3120180, 76),
    ],
)
def test_worked_layouts(
    layout: StreamLayout, caps: dict[str, int], positions: int, slots: int, pages: int
) -> None:
    assert layout.positions(caps) == positions
    assert layout.slots(caps) == slots
    assert layout.pages(caps, 128) == pages


@pytest.mark.parametrize(
    ("prefix", "growth", "page_size", "budget", "pages"),
    [
        (7, 256, 128, 384, 7),
        (24, 8, 8, 32, 9),
        (7, 3, 8, 24, 6),
        (10, 12, 8, 40, 9),
        (5, 3, 8, 1, 3),
    ],
)
@pytest.mark.parametrize("iterations", [0, 1, 10**6])
def test_worked_windows_do_not_depend_on_the_caps(
    prefix: int, growth: int, page_size: int, budget: int, pages: int, iterations: int
) -> None:
    policy = RetentionPolicy(budget, prefix)
    layout = StreamLayout((ids(prefix),), (("win", growth),), retention=policy)
    assert layout.pages({"win": iterations}, page_size) == pages


def test_a_loop_without_a_cap_runs_never() -> None:
    layout = StreamLayout(PROMPT, DECODE)
    assert (layout.positions({}), layout.slots({"other": 9})) == (321, 1344)


def test_scratch_of_a_span_raises_the_peak_and_not_the_spans_behind_it() -> None:
    layout = StreamLayout((ids(10), ids(4, scratch=30), ids(20)))
    assert layout.slots({}) == 44
    assert layout.positions({}) == 34
    assert StreamLayout((ids(10), ids(4, scratch=19), ids(20))).slots({}) == 34


def test_a_span_that_ends_past_the_prefix_is_a_step_of_the_window() -> None:
    policy = RetentionPolicy(context_budget=8, protected_prefix=8)
    inside = StreamLayout((ids(8),), retention=policy)
    past = StreamLayout((ids(8), ids(40, scratch=8)), retention=policy)
    assert (inside.pages({}, 8), past.pages({}, 8)) == (3, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spans": (ids(1),), "keyed_spans": 2}, "keyed_spans must be at most .* 1, got 2"),
        ({"growth": (("decode", -1),)}, "growth of loop 'decode' .* got -1"),
        ({"scratch": -3}, "scratch .* got -3"),
    ],
)
def test_impossible_layouts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamLayout(**fields)


@pytest.mark.parametrize("budget", [0, -1, True, 1.5])
def test_a_budget_must_be_a_positive_int(budget: Any) -> None:
    with pytest.raises(ValueError, match="context_budget"):
        RetentionPolicy(budget)


def test_a_prefix_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="protected_prefix must be .* got -1"):
        RetentionPolicy(8, -1)


def test_layouts_are_values() -> None:
    listed = StreamLayout([ids(3)], [["decode", 1]])  # type: ignore[arg-type]
    assert listed == StreamLayout((ids(3),), DECODE)
    assert len({listed, StreamLayout((ids(3),), DECODE)}) == 1


def test_a_layout_is_read_from_plain_rows() -> None:
    row = [[[300, 300, "text"], [9, 1, "image", 2, b"d", b"e"]], [["decode", 1]], 4, [32, 7], 1]
    assert StreamLayout.from_row(row) == StreamLayout(
        (PrefixSpan(300, 300, "text"), PrefixSpan(9, 1, "image", 2, b"d", b"e")),
        DECODE,
        4,
        RetentionPolicy(32, 7),
        1,
    )


def test_rows_may_hold_instances_and_leave_defaults_out() -> None:
    assert StreamLayout.from_row(ROLLING) is ROLLING
    assert StreamLayout.from_row([]) == StreamLayout()
    assert StreamLayout.from_row([[ids(3)]]) == StreamLayout((ids(3),))
    assert StreamLayout.from_row([[], [], 0, RetentionPolicy(5)]).retention == RetentionPolicy(5)


def pages_over_time(layout: StreamLayout, iterations: int, page_size: int) -> list[int]:
    """Pages in use in each step, by the commit rule applied write by write."""
    policy = layout.retention
    assert policy is not None
    writes = [(span.length, span.scratch) for span in layout.spans]
    writes += [(tokens, 0) for _ in range(iterations) for _, tokens in layout.growth]
    writes.append((0, layout.scratch))
    stored, held = 0, []
    for length, scratch in writes:
        held.append(-(-(stored + length + scratch) // page_size))
        stored += length
        if length and stored >= policy.protected_prefix:
            excess = stored - policy.protected_prefix - policy.context_budget
            behind = stored // page_size - -(-policy.protected_prefix // page_size)
            stored -= max(0, min(excess // page_size, behind)) * page_size
    return held


@given(
    prefix=st.integers(0, 40),
    later=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=3),
    growth=st.lists(st.integers(0, 30), max_size=2),
    scratch=st.integers(0, 30),
    budget=st.integers(1, 60),
    page_size=st.integers(1, 16),
    iterations=st.integers(0, 30),
)
@example(prefix=0, later=[(0, 3)], growth=[], scratch=0, budget=1, page_size=1, iterations=0)
def test_a_window_never_outgrows_its_bound(
    prefix: int,
    later: list[tuple[int, int]],
    growth: list[int],
    scratch: int,
    budget: int,
    page_size: int,
    iterations: int,
) -> None:
    spans = (ids(prefix), *(ids(length, scratch=extra) for length, extra in later))
    loops = tuple((f"loop{index}", tokens) for index, tokens in enumerate(growth))
    layout = StreamLayout(spans, loops, scratch, RetentionPolicy(budget, prefix))
    assert max(pages_over_time(layout, iterations, page_size)) <= layout.pages({}, page_size)


@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=4),
    growth=st.integers(0, 9),
    scratch=st.integers(0, 30),
    page_size=st.integers(1, 16),
    iterations=st.integers(0, 30),
)
def test_without_retention_the_bound_is_what_the_writes_reach(
    spans: list[tuple[int, int]], growth: int, scratch: int, page_size: int, iterations: int
) -> None:
    layout = StreamLayout(tuple(ids(n, scratch=s) for n, s in spans), (("w", growth),), scratch)
    stored, peak = 0, 0
    for length, extra in [*spans, *[(growth, 0)] * iterations, (0, scratch)]:
        peak = max(peak, stored + length + extra)
        stored += length
    assert layout.slots({"w": iterations}) == peak
    assert layout.pages({"w": iterations}, page_size) == -(-peak // page_size)
