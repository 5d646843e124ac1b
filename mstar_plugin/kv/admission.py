"""Admission of one step: every page it needs, or none and the reason."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mstar_plugin.kv.flight import Flight
from mstar_plugin.kv.forks import fork_needs
from mstar_plugin.kv.reservation import AdmissionPolicy
from mstar_plugin.kv.sharing import drop_lease
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import (
    IN_FLIGHT,
    LEASED,
    NULL_ROW,
    OFFLOADED,
    OFFLOADING,
    STAGED,
    IntArray,
    Lease,
    Stream,
)
from mstar_plugin.step import (
    AdmitFailedReason,
    AdmitRuntimeError,
    AllocationFailed,
    RequestOffloading,
)

_BLOCKING = IN_FLIGHT | STAGED | OFFLOADING | OFFLOADED


def reserve(state: KVState, flight: Flight) -> AdmitFailedReason | None:
    """Give every stream of the flight the pages it needs; on a refusal nothing has changed."""
    blocked = _blocked(state, flight) or _not_its_turn(state, flight)
    if blocked is None:
        _take_leases(state, flight)
        rows, needs = _page_needs(state, flight)
        takers = _takers(rows, needs)
        short = state.pages_short(sum(takers.values())) or _unsafe_growth(state, takers)
        if not short:
            _hand_out(state, flight, takers)
            _copy_partial_pages(state, flight)
            return None
        blocked = _refusal(state, rows, needs, takers, short)
    undo(state, flight)
    return blocked


def undo(state: KVState, flight: Flight) -> None:
    """Give back exactly what the admission took: pages from the tail, leases, new streams.

    Pages of a fork target that has been copied already stay with it.
    """
    table = state.table
    copied = [target for _, target in flight.pre_forks] if flight.forked else []
    # Backwards, so that the next admission takes the same pages.
    for stream, count in reversed(flight.acquired):
        if stream not in copied:
            first = int(table.num_pages[stream.row]) - count
            state.pool.release(reversed(table.drop_pages(stream.row, first, count)))
            table.generation[stream.row] += 1
    for stream, lease in flight.leases:
        if stream in copied:
            release_partial(state, lease)
        else:
            _restore_lease(state, stream, lease)
    close_opened(state, flight)
    flight.acquired, flight.leases = [], []


def close_opened(state: KVState, flight: Flight) -> None:
    """Forget the streams the flight opened, unless something has been stored in them."""
    for stream in flight.opened:
        if state.table.is_open(stream) and not state.table.stored[stream.row]:
            drop_lease(state, stream)
            state.pool.release(state.table.page_list(stream.row))
            state.table.close(stream)
    flight.opened = []


def withdraw(state: KVState, flight: Flight) -> None:
    """Undo what a step admitted ahead of time may not leave behind; its pages stay for the next.

    Leases become leases again, so that asking for the cached prefix gives the same answer.
    """
    for stream, lease in flight.leases:
        _restore_lease(state, stream, lease)
    close_opened(state, flight)
    flight.acquired, flight.leases = [], []


def release_partial(state: KVState, lease: Lease) -> None:
    """Let go of the page that was copied when the lease became the stream's."""
    if lease.partial is not None:
        state.pool.release([lease.partial])


def _blocked(state: KVState, flight: Flight) -> AdmitFailedReason | None:
    for opened in flight.opened:
        siblings = state.table.of_request(opened.request_id)
        if any(state.table.has(stream, OFFLOADING | OFFLOADED) for stream in siblings):
            return RequestOffloading(opened.label, opened.request_id)
    rows = flight.touched_rows()
    flags = state.table.flags[rows]
    if not np.bitwise_or.reduce(flags) & _BLOCKING:
        return None
    row = int(rows[np.flatnonzero(flags & _BLOCKING)[0]])
    stream = state.table[row]
    if state.table.flags[row] & (OFFLOADING | OFFLOADED):
        return RequestOffloading(stream.label, stream.request_id)
    return AdmitRuntimeError(
        f"{stream} has a step in flight already: commit it or roll it back before the next"
    )


def _not_its_turn(state: KVState, flight: Flight) -> AdmitFailedReason | None:
    gate = state.gate
    if gate is None:
        return None
    for (request_id, label), row in zip(flight.names, flight.rows.tolist(), strict=True):
        if row == NULL_ROW:
            continue
        if gate.pages_too_many(request_id):
            return AdmitRuntimeError(
                f"request {request_id!r} may come to hold {gate.pages_too_many(request_id)} pages "
                f"more than the {gate.capacity} there are: shorten it or lower its loop caps"
            )
        if not gate.enter(request_id):
            return AllocationFailed(gate.pages_short(request_id), label, request_id)
    return None


def _unsafe_growth(state: KVState, takers: dict[int, int]) -> int:
    """Pages by which the step would bring requests into each other's way, 0 when it does not."""
    gate = state.gate
    if gate is None or gate.policy is AdmissionPolicy.SUM or not takers:
        return 0
    more: Counter[str] = Counter()
    for row, count in takers.items():
        more[state.table[row].request_id] += count
    others = sum(
        int(state.table.num_pages[stream.row])
        for stream in state.table
        if not gate.is_running(stream.request_id)
    )
    others += sum(count for name, count in more.items() if not gate.is_running(name))
    return 0 if gate.may_grow(more, others) else sum(more.values())


def _take_leases(state: KVState, flight: Flight) -> None:
    table = state.table
    rows = flight.touched_rows()
    flags = table.flags[rows]
    if not np.bitwise_or.reduce(flags) & LEASED:
        return
    for row in rows[(flags & LEASED) > 0].tolist():
        stream = table[row]
        lease = stream.lease
        if lease is not None:
            table.set_pages(row, [*lease.pages, *table.page_list(row)])
            table.stored[row] = lease.tokens
            table.generation[row] += 1
            flight.leases.append((stream, lease))
            stream.lease = None
            if stream.chain is not None:
                stream.chain.num_sealed = len(lease.pages)
    table.unmark(rows, LEASED)


def _restore_lease(state: KVState, stream: Stream, lease: Lease) -> None:
    table = state.table
    table.set_pages(stream.row, table.page_list(stream.row)[len(lease.pages) :])
    table.stored[stream.row] = 0
    table.generation[stream.row] += 1
    stream.lease = lease
    table.mark([stream.row], LEASED)


def _page_needs(state: KVState, flight: Flight) -> tuple[IntArray, IntArray]:
    """Rows of the streams and the pages to add to each; 0 or less where there are enough."""
    table, rows = state.table, flight.rows
    size = state.config.page_size
    ends = table.stored[rows] + (flight.spans + (size - 1))
    needs: IntArray = ends // size - table.num_pages[rows]
    if not flight.pre_forks and not flight.post_forks:
        return rows, needs
    own = dict(zip(rows.tolist(), needs.tolist(), strict=True))
    own.update((target.row, 0) for _, target in flight.pre_forks)
    for row, missing in fork_needs(flight, state).items():
        own[row] = max(own.get(row, 0), missing)
    return np.array(list(own), dtype=np.int64), np.array(list(own.values()), dtype=np.int64)


def _takers(rows: IntArray, needs: IntArray) -> dict[int, int]:
    """Row -> pages it takes, for the streams that need any; the null row takes none."""
    taking = needs > 0
    takers = dict(zip(rows[taking].tolist(), needs[taking].tolist(), strict=True))
    takers.pop(NULL_ROW, None)
    return takers


def _hand_out(state: KVState, flight: Flight, takers: dict[int, int]) -> None:
    table = state.table
    for row, count in takers.items():
        table.append_pages(row, state.pool.acquire(count))
        table.generation[row] += 1
        flight.acquired.append((table[row], count))


def _copy_partial_pages(state: KVState, flight: Flight) -> None:
    for stream, lease in flight.leases:
        if lease.partial is not None:
            first_own = int(state.table.pages[stream.row, len(lease.pages)])
            state.cache.copy_pages([lease.partial], [first_own])


def _refusal(
    state: KVState, rows: IntArray, needs: IntArray, takers: dict[int, int], short: int
) -> AdmitFailedReason:
    stream = state.table[list(takers)[-1]]
    most = _pages_of_request(state, stream.request_id, rows, needs)
    if most > state.pool.num_usable:
        return AdmitRuntimeError(
            f"request {stream.request_id!r} needs {most} pages at once and the pool has "
            f"{state.pool.num_usable}: shorten the request or give the cache more pages"
        )
    return AllocationFailed(short, stream.label, stream.request_id)


def _pages_of_request(state: KVState, request_id: str, rows: IntArray, needs: IntArray) -> int:
    table, size = state.table, state.config.page_size
    touched = dict(zip(rows.tolist(), needs.tolist(), strict=True))
    total = 0
    for row in table.rows[request_id].values():
        if row in touched:
            total += int(table.num_pages[row]) + touched[row]
        else:
            total += -(-int(table.stored[row]) // size)
    return total
