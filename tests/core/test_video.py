import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.layout import RetentionPolicy
from mstar_plugin.video import WindowSchedule


@pytest.mark.parametrize(
    ("total", "window", "overlap", "stride", "count", "last"),
    [
        (48, 8, 0, 8, 6, range(40, 48)),
        (20, 8, 0, 8, 3, range(16, 20)),
        (8, 8, 0, 8, 1, range(8)),
        (5, 8, 0, 8, 1, range(5)),
        (20, 8, 2, 6, 3, range(12, 20)),
        (21, 8, 2, 6, 4, range(18, 21)),
    ],
)
def test_a_clip_is_cut_into_windows(
    total: int, window: int, overlap: int, stride: int, count: int, last: range
) -> None:
    schedule = WindowSchedule(total, window, context=16, overlap=overlap)
    assert (schedule.stride, schedule.num_windows) == (stride, count)
    assert schedule.units(count - 1) == last


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_windows_cover_every_unit_and_overlap_by_the_stated_amount(
    total: int, window: int, data: st.DataObject
) -> None:
    schedule = WindowSchedule(total, window, overlap=data.draw(st.integers(0, window - 1)))
    windows = [schedule.units(i) for i in range(schedule.num_windows)]
    assert {unit for units in windows for unit in units} == set(range(total))
    for before, after in zip(windows, windows[1:], strict=False):
        assert before.stop - after.start == schedule.overlap
    assert all(0 < len(units) <= window for units in windows)


def test_retention_counts_the_context_in_tokens_behind_the_labels_own_prompt() -> None:
    schedule = WindowSchedule(48, 8, context=16)
    assert schedule.retention(390, 180) == RetentionPolicy(6240, 180)
    assert schedule.retention(390, 7) == RetentionPolicy(6240, 7)


def test_a_context_of_zero_keeps_everything() -> None:
    assert WindowSchedule(48, 8).retention(390, 180) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 0, 0), "total must be an integer of at least 1, got 0"),
        ((48, 0, 0, 0), "window must be"),
        ((48, 8, -1, 0), "context must be"),
        ((48, 8, 0, -1), "overlap must be"),
        ((48, 8, 0, 8), "overlap must be smaller than window=8, got 8"),
        ((48.0, 8, 0, 0), "total must be an integer"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(
    arguments: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WindowSchedule(*arguments)


@pytest.mark.parametrize("index", [-1, 6])
def test_a_window_outside_the_clip_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=rf"must lie in 0..5, got {index}"):
        WindowSchedule(48, 8).units(index)
