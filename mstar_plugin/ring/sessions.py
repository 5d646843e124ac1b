"""Which request owns which session and at which clock, and when a step is refused. No tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mstar_plugin.ring.geometry import RingLedger

if TYPE_CHECKING:
    from mstar_plugin.kv.config import RingKVLayerConfig


@dataclass
class RingSession:
    """One resident world: its place in the storage, its clocks, and what its rings hold.

    `last_clock` is the frame last committed, None while any clock may come next. `admitted_clock`
    is the frame that was admitted and not yet committed. `is_blank` until a frame is committed or a
    state loaded.
    """

    index: int
    ledgers: dict[RingKVLayerConfig, RingLedger]
    last_clock: int | None = None
    admitted_clock: int | None = None
    is_blank: bool = True

    def commit(self) -> None:
        """Take over the admitted frame."""
        assert self.admitted_clock is not None, "commit follows an admitted frame"
        for ledger in self.ledgers.values():
            ledger.commit(self.admitted_clock)
        self.last_clock, self.admitted_clock = self.admitted_clock, None
        self.is_blank = False


@dataclass
class SessionTable:
    """Sessions by request id; the lowest free index is claimed first."""

    num_sessions: int
    geometries: frozenset[RingKVLayerConfig]
    _sessions: dict[str, RingSession | None] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_sessions))

    def ingest(self, request_id: str) -> None:
        """Make a request known; it holds no session yet."""
        self._sessions.setdefault(request_id, None)

    def forget(self, request_id: str) -> None:
        """Undo `ingest` of a request without a session."""
        self._sessions.pop(request_id, None)

    def knows(self, request_id: str) -> bool:
        return request_id in self._sessions

    def find(self, request_id: str) -> RingSession | None:
        """The request's session, None while it holds none."""
        return self._sessions.get(request_id)

    def require(self, request_id: str) -> RingSession:
        """The request's session; KeyError while it holds none."""
        session = self.find(request_id)
        if session is None:
            raise KeyError(f"request {request_id!r} holds no ring session: admit it first")
        return session

    def admitted(self, request_id: str, clock: int) -> RingSession:
        """The session of a request whose admitted frame is `clock`; RuntimeError otherwise."""
        session = self.require(request_id)
        if session.admitted_clock != clock:
            raise RuntimeError(
                f"frame {clock} of request {request_id!r} must be admitted first, "
                f"got {session.admitted_clock} as its admitted frame"
            )
        return session

    def claim(self, request_id: str) -> RingSession:
        """The request's session, taking the lowest free one if it holds none.

        KeyError for an unknown request, RuntimeError when every session is taken.
        """
        if not self.knows(request_id):
            raise KeyError(f"request {request_id!r} was never ingested: ingest it first")
        session = self.find(request_id)
        if session is None:
            if not self._free:
                raise RuntimeError(self._full_message(request_id))
            ledgers = {g: RingLedger(g.pinned_dilation, g.ring_buckets) for g in self.geometries}
            session = RingSession(heapq.heappop(self._free), ledgers)
            self._sessions[request_id] = session
        return session

    def release(self, request_id: str) -> int | None:
        """Free the request's session and return its index; None when it held none."""
        session = self.find(request_id)
        if session is None:
            return None
        self._sessions[request_id] = None
        heapq.heappush(self._free, session.index)
        return session.index

    def claimed(self) -> list[str]:
        """Ids of the requests that hold a session."""
        return [rid for rid, session in self._sessions.items() if session is not None]

    def refusal(self, request_ids: Sequence[str], frames: Sequence[tuple[str, int]]) -> str | None:
        """Why a step of these rows and clocks cannot run, None when it can."""
        return (
            _repeated("request", request_ids)
            or _repeated("clock of request", [rid for rid, _ in frames])
            or self._unfit_ids(request_ids, dict(frames))
            or self._unfit_clocks(frames)
            or self._lack_of_sessions(request_ids)
        )

    def _unfit_ids(self, request_ids: Sequence[str], clocks: dict[str, int]) -> str | None:
        for rid in request_ids:
            if not self.knows(rid):
                return f"request {rid!r} was never ingested: ingest it first"
            if rid not in clocks:
                return f"frames must give request {rid!r} a clock, got {sorted(clocks)}"
        if strangers := sorted(clocks.keys() - set(request_ids)):
            return f"frames must name requests of the batch only, got {strangers}"
        return None

    def _unfit_clocks(self, frames: Iterable[tuple[str, int]]) -> str | None:
        for rid, clock in frames:
            session = self.find(rid)
            expected = None if session is None else session.last_clock
            if type(clock) is not int or not 0 <= clock < 2**63:
                return f"clock of request {rid!r} must be an integer in 0..2**63-1, got {clock!r}"
            if expected is not None and clock != expected + 1:
                return (
                    f"clock of request {rid!r} must be {expected + 1}, one past its last "
                    f"committed frame, got {clock}: reset the request to start over"
                )
        return None

    def _lack_of_sessions(self, request_ids: Sequence[str]) -> str | None:
        newcomers = [rid for rid in request_ids if self.find(rid) is None]
        if len(newcomers) > len(self._free):
            return self._full_message(newcomers[len(self._free)])
        return None

    def _full_message(self, request_id: str) -> str:
        return (
            f"num_sessions={self.num_sessions} ring sessions are all taken, request "
            f"{request_id!r} needs one: wait for another to be removed, or raise num_sessions"
        )


def _repeated(what: str, ids: Sequence[str]) -> str | None:
    repeated = sorted({rid for rid in ids if ids.count(rid) > 1})
    return (
        f"each {what} must appear once in a step, got {repeated} repeatedly" if repeated else None
    )
