"""What ends or shortens a stream: commits with retention, explicit release, reset and removal."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from mstar_plugin.kv import retention
from mstar_plugin.kv.admission import release_partial, withdraw
from mstar_plugin.kv.flight import Flight
from mstar_plugin.kv.forks import apply_forks
from mstar_plugin.kv.sharing import drop_chain, drop_lease, index_written, start_chain
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import (
    IN_FLIGHT,
    KEYED,
    NULL_ROW,
    OFFLOADED,
    OFFLOADING,
    RETAINED,
    STAGED,
    IntArray,
    Stream,
)
from mstar_plugin.step import StepContext

_MOVING = OFFLOADING | OFFLOADED


def keep(state: KVState, flight: Flight, ctx: StepContext) -> None:
    """Commit what the flight wrote: lengths, prefix index, retention, post-forks, in that order.

    `ValueError`, with nothing changed, for a policy that does not fit its stream.
    """
    ruled = _ruled_rows(state, flight)
    before = _advance(state, flight)
    if ruled:
        rows = [row for row, _, _ in ruled]
        state.table.protected[rows] = [prefix for _, prefix, _ in ruled]
        state.table.mark(rows, RETAINED)
    replaced = {target.row for _, target in flight.post_forks}
    if state.index is not None and not ctx.capture:
        _offer(state, flight, before, ctx.graph_walk, replaced)
    for row, _, excess in ruled:
        if excess > 0 and row not in replaced:
            release_pages(state, state.table[row], excess)
    apply_forks(flight.post_forks, state)


def finish(state: KVState, flight: Flight) -> None:
    """End a flight: its streams may move again and what it held back is free."""
    state.table.unmark(flight.touched_rows(), IN_FLIGHT | STAGED)
    state.pool.release(flight.fenced)
    for _, lease in flight.leases:
        release_partial(state, lease)
    flight.fenced, flight.leases = [], []
    state.flights = [other for other in state.flights if other is not flight]


def finish_ahead(state: KVState, staged: Flight) -> None:
    """End a step that was admitted ahead of time and does not come; its pages stay."""
    state.table.unmark(staged.touched_rows(), STAGED)
    withdraw(state, staged)


def require_at_rest(state: KVState, stream: Stream) -> None:
    """`RuntimeError` while the stream is in a step or away from the device."""
    if state.table.flags[stream.row] & (IN_FLIGHT | STAGED | _MOVING):
        raise RuntimeError(
            f"{stream} must be at rest on the device to release tokens, it is in a step or away"
        )


def release_tokens(state: KVState, stream: Stream, num_tokens: int, protected_prefix: int) -> int:
    """Release the oldest `num_tokens` behind the prefix, rounded down to whole pages.

    Returns the tokens released. `ValueError` for a prefix that is longer than the stream or differs
    from an earlier one.
    """
    table, size = state.table, state.config.page_size
    stored = int(table.stored[stream.row])
    if num_tokens < 0 or protected_prefix < 0:
        raise ValueError(
            f"num_tokens and protected_prefix must be 0 or more, got {num_tokens} "
            f"and {protected_prefix}"
        )
    protected = int(table.protected[stream.row])
    if protected_prefix > stored or protected not in (0, protected_prefix):
        _refuse_prefix(stream, protected_prefix, stored, protected)
    table.protected[stream.row] = protected_prefix
    first = retention.protected_pages(protected_prefix, size)
    return release_pages(state, stream, min(num_tokens // size, stored // size - first)) * size


def release_pages(state: KVState, stream: Stream, num_pages: int) -> int:
    """Drop the oldest whole pages behind the protected ones; returns how many."""
    table, size = state.table, state.config.page_size
    if num_pages <= 0:
        return 0
    first = retention.protected_pages(int(table.protected[stream.row]), size)
    state.give_back(stream, table.drop_pages(stream.row, first, num_pages))
    table.stored[stream.row] -= num_pages * size
    table.released[stream.row] += num_pages * size
    table.generation[stream.row] += 1
    table.mark([stream.row], RETAINED)
    drop_chain(state, stream)
    return num_pages


def reset(state: KVState, stream: Stream, free: bool) -> None:
    """Empty a stream. Its pages stay for reuse unless `free`, or one of them is shared."""
    table = state.table
    in_flight = table.has(stream, IN_FLIGHT)
    _detach(state, stream)
    pages = table.page_list(stream.row)
    if free or in_flight or len(state.pool.writable(pages)) < len(pages):
        state.give_back(stream, table.drop_pages(stream.row, 0, len(pages)))
    _forget_in_flights(state, stream)
    for counter in (table.stored, table.released, table.protected):
        counter[stream.row] = 0
    table.generation[stream.row] += 1
    stream.reset_generation += 1
    stream.adopted = None
    table.unmark([stream.row], RETAINED)
    start_chain(state, stream)


def remove(state: KVState, stream: Stream) -> None:
    """Close a stream and give back everything it holds."""
    _detach(state, stream)
    state.give_back(stream, state.table.page_list(stream.row))
    _forget_in_flights(state, stream)
    state.table.close(stream)


def _detach(state: KVState, stream: Stream) -> None:
    drop_lease(state, stream)
    state.table.unmark([stream.row], _MOVING)
    state.release_host_pages(stream)


def _forget_in_flights(state: KVState, stream: Stream) -> None:
    for flight in state.flights:
        for _, lease in [taken for taken in flight.leases if taken[0] is stream]:
            release_partial(state, lease)
        flight.forget(stream)
    state.table.unmark([stream.row], IN_FLIGHT)


def _ruled_rows(state: KVState, flight: Flight) -> list[tuple[int, int, int]]:
    """Rows that this commit extends under a policy: row, prefix, pages it will then release.

    `ValueError` for a policy that does not fit its stream.
    """
    declared = flight.step.retention
    if not declared:
        return []
    table, size = state.table, state.config.page_size
    ends = (table.stored[flight.rows] + flight.spans).tolist()
    protected = table.protected[flight.rows].tolist()
    ruled = []
    spans = flight.spans.tolist()
    for name, span, row, stored, kept in zip(
        flight.names, spans, flight.rows.tolist(), ends, protected, strict=True
    ):
        policy = declared.get(name)
        if policy is not None and row != NULL_ROW and span:
            prefix = policy.protected_prefix
            if prefix > stored or kept not in (0, prefix):
                _refuse_prefix(table[row], prefix, stored, kept)
            due = stored - prefix - policy.context_budget >= size
            budget = policy.context_budget
            excess = retention.released_pages(stored, budget, prefix, size) if due else 0
            ruled.append((row, prefix, excess))
    return ruled


def _refuse_prefix(stream: Stream, prefix: int, stored: int, protected: int) -> NoReturn:
    if prefix > stored:
        raise ValueError(
            f"protected_prefix of {stream} must lie within the {stored} tokens it stores, "
            f"got {prefix}"
        )
    raise ValueError(
        f"protected_prefix of {stream} must stay {protected} until it is reset, got {prefix}"
    )


def _advance(state: KVState, flight: Flight) -> IntArray:
    """Add the spans to the streams; returns the lengths before."""
    table, rows = state.table, flight.rows
    before = table.stored[rows]
    table.stored[rows] = before + flight.spans
    table.generation[rows] += flight.spans > 0
    table.stored[NULL_ROW] = table.generation[NULL_ROW] = 0
    return before


def _offer(
    state: KVState,
    flight: Flight,
    before: IntArray,
    walk: str | None,
    replaced: set[int],
) -> None:
    """Index what the commit filled. Decode rows in the middle of a page need no look at all."""
    table, rows, size = state.table, flight.rows, state.config.page_size
    keyed = table.flags[rows] & KEYED
    if not keyed.any():
        return
    after = before + flight.spans
    due = (after // size > before // size) | (before < table.laid_out[rows])
    due |= after > table.covered[rows]
    due &= keyed > 0
    for index in np.flatnonzero(due & (flight.spans > 0)).tolist():
        stream = table[int(rows[index])]
        if stream.row in replaced:
            drop_chain(state, stream)
        else:
            index_written(state, stream, int(before[index]), int(after[index]), walk)
