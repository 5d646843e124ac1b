import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.ring.geometry import (
    RingLedger,
    bucket,
    is_write_step,
    num_phases,
    phase,
    slot,
    visible_frames,
    visible_slots,
    write_slot,
)

# frame, bucket, slot, write step, ring frames seen, frames attended (itself included)
DENSE_16 = [
    (0, 0, 0, True, [], 1),
    (1, 1, 1, True, [0], 2),
    (2, 2, 2, True, [0, 1], 3),
    *[(f, f, f, True, list(range(f)), f + 1) for f in range(3, 15)],
    (15, 15, 15, True, list(range(15)), 16),
    (16, 16, 0, True, list(range(1, 16)), 16),
    (17, 17, 1, True, list(range(2, 17)), 16),
    (18, 18, 2, True, list(range(3, 18)), 16),
    (19, 19, 3, True, list(range(4, 19)), 16),
    (20, 20, 4, True, list(range(5, 20)), 16),
]
DILATED_16 = [
    (0, 0, 0, True, [], 1),
    *[(f, 1, 1, False, [0], 2) for f in range(1, 8)],
    (8, 1, 1, True, [0], 2),
    *[(f, 2, 2, False, [0, 8], 3) for f in range(9, 16)],
    (16, 2, 2, True, [0, 8], 3),
    *[(f, 3, 3, False, [0, 8, 16], 4) for f in range(17, 21)],
    (127, 16, 0, False, list(range(0, 121, 8)), 17),
    (128, 16, 0, True, list(range(8, 121, 8)), 16),
    (129, 17, 1, False, list(range(8, 129, 8)), 17),
]
DILATED_4 = [
    *[(f, 4, 0, False, [0, 8, 16, 24], 5) for f in range(25, 32)],
    (32, 4, 0, True, [8, 16, 24], 4),
    (33, 5, 1, False, [8, 16, 24, 32], 5),
]
ROWS = [
    pytest.param(d, b, *row, id=f"d{d}-b{b}-f{row[0]}")
    for d, b, table in [(1, 16, DENSE_16), (8, 16, DILATED_16), (8, 4, DILATED_4)]
    for row in table
]

dilations = st.integers(1, 12)
bucket_counts = st.integers(1, 20)
frames = st.integers(0, 2000)


@pytest.mark.parametrize(("d", "b", "f", "at", "cursor", "write", "sees", "attended"), ROWS)
def test_a_frame_writes_and_sees_what_the_worked_table_says(
    d: int, b: int, f: int, at: int, cursor: int, write: bool, sees: list[int], attended: int
) -> None:
    assert (bucket(f, d), slot(f, d, b), is_write_step(f, d)) == (at, cursor, write)
    assert list(visible_frames(f, d, b)) == sees
    assert len(sees) + 1 == attended
    assert visible_slots(f, d, b) == tuple(sorted(slot(x, d, b) for x in sees))


@given(frame=frames, buckets=bucket_counts)
def test_a_dense_ring_is_a_sliding_window_that_includes_the_current_frame(
    frame: int, buckets: int
) -> None:
    window = range(max(0, frame - buckets + 1), frame + 1)
    assert [*visible_frames(frame, 1, buckets), frame] == list(window)


@given(frame=frames, dilation=dilations, buckets=bucket_counts)
def test_a_dilated_ring_sees_every_dth_frame_of_its_horizon_and_the_current_one(
    frame: int, dilation: int, buckets: int
) -> None:
    kept = [f for f in range(frame) if f % dilation == 0 and f > frame - buckets * dilation]
    if frame % dilation != 0:
        kept = [f for f in range(frame) if f % dilation == 0][-buckets:]
    assert list(visible_frames(frame, dilation, buckets)) == kept


@given(frame=frames, dilation=dilations, buckets=bucket_counts)
def test_the_closed_form_equals_the_set_difference_it_stands_for(
    frame: int, dilation: int, buckets: int
) -> None:
    written = {slot(x, dilation, buckets) for x in range(0, frame, dilation)}
    hidden = {(frame // dilation) % buckets} if frame % dilation == 0 else set()
    assert visible_slots(frame, dilation, buckets) == tuple(sorted(written - hidden))


@given(dilation=dilations, buckets=bucket_counts, data=st.data())
def test_the_ledger_equals_the_closed_form_for_an_unbroken_sequence(
    dilation: int, buckets: int, data: st.DataObject
) -> None:
    ledger = RingLedger(dilation, buckets)
    for frame in range(data.draw(st.integers(1, 3 * buckets * dilation))):
        assert ledger.visible_slots(frame) == visible_slots(frame, dilation, buckets)
        ledger.commit(frame)


@given(frame=frames, dilation=dilations, buckets=bucket_counts)
def test_frames_of_one_phase_see_the_same_slots(frame: int, dilation: int, buckets: int) -> None:
    row = phase(frame, dilation, buckets)
    assert 0 <= row < num_phases(dilation, buckets)
    frame_slots = sorted(
        slot(x, dilation, buckets) for x in visible_frames(frame, dilation, buckets)
    )
    assert visible_slots(row, dilation, buckets) == tuple(frame_slots)


def test_a_session_that_starts_late_sees_only_what_it_wrote() -> None:
    ledger = RingLedger(dilation=1, buckets=16)
    assert visible_slots(37, 1, 16) != ()
    assert ledger.visible_slots(37) == ()
    ledger.commit(37)
    assert ledger.visible_slots(38) == (37 % 16,)


def test_a_restored_ledger_continues_under_another_clock() -> None:
    ledger = RingLedger(dilation=1, buckets=4)
    ledger.restore([True, True, False, False])
    assert ledger.visible_slots(0) == (1,)
    assert ledger.visible_slots(2) == (0, 1)


@pytest.mark.parametrize("frame", [2**31 - 1, 2**31, 2**31 + 7, 2**62])
def test_frames_beyond_32_bits_keep_their_slot(frame: int) -> None:
    assert slot(frame, 8, 16) == ((frame + 7) // 8) % 16
    assert write_slot(frame, 8, 16) == (((frame // 8) % 16) if frame % 8 == 0 else None)
    assert len(visible_slots(frame, 8, 16)) == (15 if frame % 8 == 0 else 16)


def test_the_arithmetic_does_not_import_torch() -> None:
    code = "import sys, mstar_plugin.ring.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
