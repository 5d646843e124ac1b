"""Admission of whole requests by what their layouts say they may come to hold.

Integers only. Without it a step is admitted when its pages are free now, and requests that grow
together can fill the pool so that none of them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from mstar_plugin.kv.config import KVReqConfig, StreamLayout

BACKFILL_WINDOW = 128


class AdmissionPolicy(Enum):
    """`SUM` keeps every running request's bound free. `PEAK` lets bounds overlap as long as there
    is an order in which all can finish, and checks that again whenever a request grows.
    """

    SUM = "sum"
    PEAK = "peak"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages a request holds once its prompt is written and at most, and how long it runs."""

    prompt_pages: int
    max_pages: int
    iterations: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Pages a request holds now and may come to hold."""

    held: int
    most: int


def reservation_of(config: KVReqConfig, page_size: int) -> Reservation | None:
    """What the request's layouts say; None without layouts.

    A stream under retention counts as its window or, when it is too short to fill that, whole.
    """
    layouts = list((config.kv_layout or {}).values())
    if not layouts:
        return None
    caps = config.loop_caps or {}
    bounds = [_max_pages(layout, caps, page_size) for layout in layouts]
    prompts = [
        min(bound, -(-max(layout.span_peak, layout.base_slots + layout.scratch) // page_size))
        for layout, bound in zip(layouts, bounds, strict=True)
    ]
    loops = {loop for layout in layouts for loop, tokens in layout.growth if tokens}
    return Reservation(sum(prompts), sum(bounds), sum(caps.get(loop, 0) for loop in loops))


def _max_pages(layout: StreamLayout, caps: dict[str, int], page_size: int) -> int:
    return min(layout.pages(caps, page_size), -(-layout.slots(caps) // page_size))


def iterations_left(config: KVReqConfig, committed: dict[str, int]) -> int:
    """Iterations a request may still run, from the tokens each label has committed.

    Example: 20 tokens of spans, growth 2 per "decode", cap 50, 60 committed -> 30.
    """
    caps = config.loop_caps or {}
    left = 0
    for label, layout in (config.kv_layout or {}).items():
        total = sum(caps.get(loop, 0) for loop, tokens in layout.growth if tokens)
        grown = sum(tokens * caps.get(loop, 0) for loop, tokens in layout.growth)
        done = max(0, committed.get(label, 0) - layout.base_slots)
        left = max(left, total - done * total // grown if grown else 0)
    return left


def can_all_finish(holdings: Iterable[Holding], capacity: int) -> bool:
    """Whether the requests can end one after the other, each taking the most it may.

    Example: capacity 10, twice 2 held of at most 8 -> True; twice 5 of at most 8 -> False.
    """
    listed = list(holdings)
    free = capacity - sum(holding.held for holding in listed)
    for holding in sorted(listed, key=lambda one: one.most - one.held):
        if free < max(0, holding.most - holding.held):
            return False
        free += holding.held
    return free >= 0


class AdmissionGate:
    """First come, first served over `capacity` pages; a later request may pass the first one that
    waits if it is among the next `BACKFILL_WINDOW` and does not delay it.

    Whether it would is told from the iterations that the running requests have left at most.
    `pages_of` and `iterations_left` ask what a running request holds and how long it may still run.
    """

    def __init__(
        self,
        capacity: int,
        policy: AdmissionPolicy,
        pages_of: Callable[[str], int],
        iterations_left: Callable[[str], int],
    ) -> None:
        self.capacity = capacity
        self.policy = policy
        self._pages_of = pages_of
        self._iterations_left = iterations_left
        self._waiting: dict[str, Reservation] = {}
        self._running: dict[str, Reservation] = {}
        self._too_large: dict[str, int] = {}

    def enqueue(self, request_id: str, reservation: Reservation) -> None:
        """Let a new request wait for its turn, if it can ever have one."""
        if reservation.max_pages > self.capacity:
            self._too_large[request_id] = reservation.max_pages
        else:
            self._waiting[request_id] = reservation

    def pages_too_many(self, request_id: str) -> int:
        """Pages by which the request alone is larger than the capacity."""
        return max(0, self._too_large.get(request_id, 0) - self.capacity)

    def pages_short(self, request_id: str) -> int:
        """Pages that running requests have to give back before this one surely starts."""
        reserved = sum(one.max_pages for one in self._running.values())
        waiting = self._waiting.get(request_id)
        return max(1, reserved + (waiting.max_pages if waiting else 0) - self.capacity)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def enter(self, request_id: str) -> bool:
        """Start the request if it is its turn; True when it runs. Unknown ids are not gated."""
        reservation = self._waiting.get(request_id)
        if reservation is None:
            return True
        if not self._may_start(request_id, reservation):
            return False
        self._running[request_id] = self._waiting.pop(request_id)
        return True

    def leave(self, request_id: str) -> None:
        for requests in (self._waiting, self._running, self._too_large):
            requests.pop(request_id, None)

    def step_aside(self, request_id: str) -> None:
        """Make a running request wait again, behind those it gives way to."""
        reservation = self._running.pop(request_id, None)
        if reservation is not None:
            self._waiting[request_id] = reservation

    def may_grow(self, more_pages: dict[str, int], held_by_others: int) -> bool:
        """Whether all running requests can still finish once some of them hold more pages.

        `held_by_others` are pages of requests that are not gated, which may never come back.
        """
        if self.policy is AdmissionPolicy.SUM:
            return True
        holdings = [
            Holding(
                held := self._pages_of(name) + more_pages.get(name, 0), max(held, one.max_pages)
            )
            for name, one in self._running.items()
        ]
        return can_all_finish(holdings, self.capacity - held_by_others)

    def _may_start(self, request_id: str, reservation: Reservation) -> bool:
        running = list(self._running)
        if not self._fits(running, [reservation]):
            return False
        first = next(iter(self._waiting))
        if request_id == first:
            return True
        if request_id not in islice(self._waiting, BACKFILL_WINDOW + 1):
            return False
        return not self._delays(self._waiting[first], reservation)

    def _delays(self, first: Reservation, later: Reservation) -> bool:
        """Whether `first` would have to wait longer with `later` running."""
        left = sorted((self._iterations_left(name), name) for name in self._running)
        for number, ends in enumerate([0, *(ends for ends, _ in left)]):
            staying = [name for _, name in left[number:]]
            if self._fits(staying, [first]):
                return later.iterations > ends and not self._fits(staying, [first, later])
        return True

    def _fits(self, running: Sequence[str], new: Sequence[Reservation]) -> bool:
        if self.policy is AdmissionPolicy.SUM:
            bounds = [self._running[name].max_pages for name in running]
            return sum(bounds) + sum(one.max_pages for one in new) <= self.capacity
        holdings = [
            Holding(held := self._pages_of(name), max(held, self._running[name].max_pages))
            for name in running
        ]
        return can_all_finish(
            [*holdings, *(Holding(one.prompt_pages, one.max_pages) for one in new)], self.capacity
        )
