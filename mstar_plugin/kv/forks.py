"""Forks: the pages a copy needs, the copy as a plan sees it beforehand, and the copy itself."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_plugin.kv.flight import Flight, ForkPair
from mstar_plugin.kv.planner import PendingFork
from mstar_plugin.kv.sharing import drop_chain, drop_lease
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import RETAINED, Stream


def fork_needs(flight: Flight, state: KVState) -> dict[int, int]:
    """Table row -> pages a fork target lacks to hold its copy and what the step adds to it.

    A copy needs `ceil(source length / S)` pages that may be overwritten; sealed ones the target
    holds do not count. A pre-fork copies the source as it is, a post-fork as the step leaves it.
    """
    size, lengths, needed = state.config.page_size, _Lengths(state), dict[int, int]()
    spans = dict(zip(flight.rows.tolist(), flight.spans.tolist(), strict=True))
    for source, target in flight.pre_forks:
        lengths[target.row] = lengths[source.row]
        needed[target.row] = max(needed.get(target.row, 0), -(-lengths[target.row] // size))
    for row in {stream.row for stream in flight.forked_streams()} & spans.keys():
        lengths[row] += spans[row]
        if row in needed:
            needed[row] = max(needed[row], -(-lengths[row] // size))
    for source, target in flight.post_forks:
        lengths[target.row] = lengths[source.row]
        needed[target.row] = max(needed.get(target.row, 0), -(-lengths[target.row] // size))
    return {row: pages - len(_writable(row, state)) for row, pages in needed.items()}


def pending_forks(pairs: Sequence[ForkPair], state: KVState) -> dict[int, PendingFork]:
    """The targets as they will be after the copies, which are not made."""
    table = state.table
    pending: dict[int, PendingFork] = {}
    for source, target in pairs:
        earlier = pending.get(source.row)
        stored = int(table.stored[source.row]) if earlier is None else earlier.stored
        generation = int(table.generation[target.row]) + 1
        pending[target.row] = PendingFork(_writable(target.row, state), stored, generation)
    return pending


def apply_forks(pairs: Sequence[ForkPair], state: KVState) -> None:
    """Make each target a copy of its source, in order, on pages of its own."""
    for source, target in pairs:
        _copy(source, target, state)


def _copy(source: Stream, target: Stream, state: KVState) -> None:
    table = state.table
    pages = _writable(target.row, state)
    num_copied = -(-int(table.stored[source.row]) // state.config.page_size)
    drop_lease(state, target)
    drop_chain(state, target)
    sealed = set(table.page_list(target.row)) - set(pages)
    state.pool.release(sealed)
    state.cache.copy_pages(table.page_list(source.row)[:num_copied], pages[:num_copied])
    table.set_pages(target.row, pages)
    for counter in (table.stored, table.released, table.protected):
        counter[target.row] = counter[source.row]
    table.generation[target.row] += 1
    target.reset_generation += 1
    target.adopted = None
    table.unmark([target.row], RETAINED)
    table.mark([target.row], int(table.flags[source.row]) & RETAINED)


def _writable(row: int, state: KVState) -> list[int]:
    return state.pool.writable(state.table.page_list(row))


class _Lengths(dict[int, int]):
    """Stored tokens by row, read from the table until overwritten."""

    def __init__(self, state: KVState) -> None:
        super().__init__()
        self._stored = state.table.stored

    def __missing__(self, row: int) -> int:
        return int(self._stored[row])
