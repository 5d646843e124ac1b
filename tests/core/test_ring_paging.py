import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.ring.geometry import visible_frames
from mstar_plugin.ring.paging import FramePages, chunk_frames

dilations = st.integers(1, 9)
bucket_counts = st.integers(1, 9)


def frames_in_use(first: int, last: int, dilation: int, buckets: int) -> set[int]:
    """Frames that the tokens of a chunk see or write."""
    used = set(range(first, last + 1))
    for frame in range(first, last + 1):
        used.update(visible_frames(frame, dilation, buckets))
    return used


@given(tokens=st.integers(1, 200), per_frame=st.integers(1, 40))
def test_chunk_frames_is_the_most_a_chunk_can_touch(tokens: int, per_frame: int) -> None:
    touched = [
        (start + tokens - 1) // per_frame - start // per_frame + 1 for start in range(per_frame)
    ]
    assert chunk_frames(tokens, per_frame) == max(touched)


@given(d=dilations, b=bucket_counts, n=st.integers(1, 12), first=st.integers(0, 200))
def test_frames_that_a_chunk_sees_or_writes_have_pages_of_their_own(
    d: int, b: int, n: int, first: int
) -> None:
    pages = FramePages(dilation=d, buckets=b, chunk_frames=n)
    used = frames_in_use(first, first + n - 1, d, b)
    places = {pages.page_of(frame) for frame in used}
    assert len(places) == len(used)
    assert places <= set(range(pages.num_pages))


@given(d=dilations, b=bucket_counts, n=st.integers(1, 12))
def test_no_page_is_held_in_vain(d: int, b: int, n: int) -> None:
    pages = FramePages(dilation=d, buckets=b, chunk_frames=n)
    late = 5 * d * b
    kept, passing = 0, 0
    for first in range(late, late + d):
        used = frames_in_use(first, first + n - 1, d, b)
        kept = max(kept, sum(frame % d == 0 for frame in used))
        passing = max(passing, sum(frame % d != 0 for frame in used))
    assert (pages.num_kept, pages.num_passing) == (kept, passing)


@pytest.mark.parametrize(
    ("d", "b", "n", "kept", "passing"),
    [
        (1, 16, 1, 16, 0),
        (1, 16, 4, 19, 0),
        (8, 16, 1, 16, 1),
        (8, 16, 3, 17, 3),
        (8, 16, 17, 18, 15),
    ],
)
def test_worked_sizes(d: int, b: int, n: int, kept: int, passing: int) -> None:
    pages = FramePages(dilation=d, buckets=b, chunk_frames=n)
    assert (pages.num_kept, pages.num_passing) == (kept, passing)
    assert pages.num_pages == kept + passing


def test_kept_and_passing_frames_take_turns() -> None:
    pages = FramePages(dilation=2, buckets=2, chunk_frames=1)
    assert [pages.page_of(frame) for frame in range(6)] == [0, 2, 1, 2, 0, 2]
