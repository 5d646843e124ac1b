"""Ring arithmetic: where a frame is written and which frames a query frame still sees.

Letters: `f` frame clock (0, 1, 2, ...), `d` dilation (every d-th frame is kept), `b` buckets (slots
the write cursor cycles through). Integers only: the same functions serve the cache, the planner and
a server's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def bucket(frame: int, dilation: int) -> int:
    """Kept frames before `frame`, the cursor's position: `ceil(f / d)`. Example: f=17, d=8 -> 3."""
    return -(-frame // dilation)


def slot(frame: int, dilation: int, buckets: int) -> int:
    """Slot the cursor points at during `frame`: `bucket % b`. Example: f=129, d=8, b=16 -> 1."""
    return bucket(frame, dilation) % buckets


def is_write_step(frame: int, dilation: int) -> bool:
    """Whether a committing pass of `frame` keeps it; other frames are lost to later ones."""
    return frame % dilation == 0


def write_slot(frame: int, dilation: int, buckets: int) -> int | None:
    """Slot that a committing pass of `frame` overwrites, or None where it keeps nothing.

    The frame itself, in all its passes, no longer sees what is there.
    Example: d=8, b=4 -> f=31 None, f=32 0.
    """
    return slot(frame, dilation, buckets) if is_write_step(frame, dilation) else None


def visible_frames(frame: int, dilation: int, buckets: int) -> range:
    """Earlier frames that `frame` sees, every frame from 0 on committed; itself comes on top.

    The last `b` multiples of `d` before `f`, one fewer if `f` is kept itself and the ring is full.
    Example: d=8, b=4 -> f=31 sees 0, 8, 16, 24; f=32 sees 8, 16, 24; f=33 sees 8, 16, 24, 32.
    """
    kept = bucket(frame, dilation)
    resident = buckets - 1 if is_write_step(frame, dilation) else buckets
    return range(max(0, kept - resident) * dilation, kept * dilation, dilation)


def num_phases(dilation: int, buckets: int) -> int:
    """Distinct rows of a visibility table: `2 * b * d`, a filling lap and a full lap."""
    return 2 * buckets * dilation


def phase(frame: int, dilation: int, buckets: int) -> int:
    """Row of `frame` in a table of `num_phases` rows: frames of one phase see the same slots.

    `f` in the first lap, `b*d + f % (b*d)` after it. Example: d=8, b=4 -> f=31 is 31, f=33 and f=65
    are 33.
    """
    lap = buckets * dilation
    return frame if frame < lap else lap + frame % lap


def visible_slots(frame: int, dilation: int, buckets: int) -> tuple[int, ...]:
    """Ring slots that `frame` sees when every frame from 0 on was committed, ascending.

    Example: d=8, b=4 -> f=31 sees (0, 1, 2, 3), f=32 sees (1, 2, 3).
    """
    return _slots_of_phase(phase(frame, dilation, buckets), dilation, buckets)


@lru_cache(maxsize=4096)
def _slots_of_phase(phase_row: int, dilation: int, buckets: int) -> tuple[int, ...]:
    frames = visible_frames(phase_row, dilation, buckets)
    return tuple(sorted(slot(f, dilation, buckets) for f in frames))


class RingLedger:
    """Slots of one ring that hold a frame, kept up to date commit by commit.

    Equal to the closed form while frames are committed from 0 without a gap, and right where the
    closed form is not: for a session that starts at a later frame, or one that continues from a
    restored state under another clock.
    """

    def __init__(self, dilation: int, buckets: int) -> None:
        self._dilation = dilation
        self._buckets = buckets
        self._written = [False] * buckets

    def visible_slots(self, frame: int) -> tuple[int, ...]:
        """Slots that `frame` sees, ascending: the written ones without its own."""
        hidden = write_slot(frame, self._dilation, self._buckets)
        return tuple(s for s, written in enumerate(self._written) if written and s != hidden)

    def commit(self, frame: int) -> None:
        """Record a committing pass of `frame`."""
        target = write_slot(frame, self._dilation, self._buckets)
        if target is not None:
            self._written[target] = True

    def restore(self, written: Sequence[bool]) -> None:
        """Take over the slots of a saved ring: `b` flags."""
        self._written = list(written)
