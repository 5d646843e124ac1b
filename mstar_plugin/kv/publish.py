"""Handing streams from one manager to another of the same process: prefill here, decode there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_plugin.kv import lifecycle
from mstar_plugin.kv.cache import copy_pages
from mstar_plugin.kv.sharing import drop_chain
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import IN_FLIGHT, OFFLOADED, OFFLOADING, STAGED, Stream
from mstar_plugin.step import (
    AdmitFailedReason,
    AdmitRuntimeError,
    AllocationFailed,
    RequestOffloading,
)


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """One label as it was published: pages in order, token counts, how often it was reset."""

    pages: tuple[int, ...]
    stored: int
    released: int
    protected_prefix: int
    reset_generation: int

    @property
    def total(self) -> int:
        """Tokens committed since the last reset."""
        return self.stored + self.released


@dataclass(frozen=True, slots=True)
class PublishedKV:
    """What another manager needs to take a request over. `source` is the publisher's state."""

    request_id: str
    world_size: int
    streams: Mapping[str, PublishedStream]
    source: KVState


def snapshot(
    state: KVState, request_id: str, labels: list[str], world_size: int
) -> PublishedKV | None:
    """The labels that are on the device and store something; None when there is none."""
    table = state.table
    published = {}
    for label in labels:
        stream = table.get(request_id, label)
        if stream is not None and table.stored[stream.row] and not table.has(stream, OFFLOADED):
            published[label] = _snapshot(state, stream)
    if not published:
        return None
    return PublishedKV(request_id, world_size, published, state)


def retrieve(
    state: KVState, request_id: str, published: PublishedKV, world_size: int
) -> AdmitFailedReason | None:
    """Make the request's streams what was published, all labels or none; None when it is done.

    Only what is new since the last retrieval is copied. Both managers stand still meanwhile, so
    that no page changes hands under the copy.
    """
    first, second = sorted((state.lock, published.source.lock), key=id)
    with first, second:
        refused = _mismatch(state, request_id, published, world_size)
        if refused is not None:
            return refused
        wanted = {
            label: remote
            for label, remote in published.streams.items()
            if not _is_up_to_date(state, request_id, label, remote)
        }
        for label, remote in wanted.items():
            refused = _not_now(state, request_id, label, remote, published)
            if refused is not None:
                return refused
        return _take_over(state, request_id, wanted, published.source)


def _snapshot(state: KVState, stream: Stream) -> PublishedStream:
    table, row = state.table, stream.row
    stored = int(table.stored[row])
    return PublishedStream(
        pages=tuple(table.page_list(row)[: -(-stored // state.config.page_size)]),
        stored=stored,
        released=int(table.released[row]),
        protected_prefix=int(table.protected[row]),
        reset_generation=stream.reset_generation,
    )


def _mismatch(
    state: KVState, request_id: str, published: PublishedKV, world_size: int
) -> AdmitFailedReason | None:
    if request_id not in state.requests:
        return AdmitRuntimeError(f"request {request_id!r} must be ingested before it is taken over")
    if published.world_size != world_size:
        return AdmitRuntimeError(
            f"the world size of both managers must be equal, {published.world_size} published "
            f"request {published.request_id!r} and {world_size} takes it over"
        )
    mine, theirs = (
        (data.shape[0], *data.shape[2:], data.dtype)
        for data in (state.cache.data, published.source.cache.data)
    )
    if mine != theirs:
        return AdmitRuntimeError(
            f"the pages of both managers must be alike, got {mine} here and {theirs} there"
        )
    return None


def _is_up_to_date(state: KVState, request_id: str, label: str, remote: PublishedStream) -> bool:
    stream = state.table.get(request_id, label)
    if stream is None or stream.adopted is None:
        return False
    generation, total = stream.adopted
    return generation == remote.reset_generation and total >= remote.total


def _not_now(
    state: KVState, request_id: str, label: str, remote: PublishedStream, published: PublishedKV
) -> AdmitFailedReason | None:
    origin = published.source.table.get(published.request_id, label)
    if origin is None or not _still_there(published.source, origin, remote):
        return AdmitRuntimeError(
            f"label {label!r} of request {published.request_id!r} has changed since it was "
            "published: publish it again"
        )
    local = state.table.get(request_id, label)
    if local is None:
        return None
    if state.table.has(local, OFFLOADED | OFFLOADING):
        return RequestOffloading(label, request_id)
    if state.table.has(local, IN_FLIGHT | STAGED):
        return AdmitRuntimeError(f"{local} has a step in flight: commit it before taking over")
    if _same_life(local, remote) and _total(state, local) != (local.adopted or (0, 0))[1]:
        return AdmitRuntimeError(
            f"{local} was written to here and there since it was taken over: reset it first"
        )
    return None


def _still_there(source: KVState, origin: Stream, remote: PublishedStream) -> bool:
    table, row = source.table, origin.row
    return (
        origin.reset_generation == remote.reset_generation
        and not table.has(origin, OFFLOADED)
        and int(table.released[row]) == remote.released
        and int(table.stored[row]) >= remote.stored
    )


def _same_life(local: Stream, remote: PublishedStream) -> bool:
    return local.adopted is not None and local.adopted[0] == remote.reset_generation


def _total(state: KVState, stream: Stream) -> int:
    return int(state.table.stored[stream.row] + state.table.released[stream.row])


def _take_over(
    state: KVState, request_id: str, wanted: Mapping[str, PublishedStream], source: KVState
) -> AdmitFailedReason | None:
    needed: dict[str, int] = {}
    for label, remote in wanted.items():
        stream = _emptied_unless_continued(state, request_id, label, remote)
        needed[label] = max(0, len(remote.pages) - int(state.table.num_pages[stream.row]))
    short = state.pages_short(sum(needed.values()))
    if short:
        return AllocationFailed(short, max(needed, key=lambda label: needed[label]), request_id)
    for label, remote in wanted.items():
        row = state.table.rows[request_id][label]
        state.table.append_pages(row, state.pool.acquire(needed[label]))
        first = int(state.table.stored[row]) // state.config.page_size
        pages = state.table.page_list(row)[first : len(remote.pages)]
        copy_pages(source.cache.data, remote.pages[first:], state.cache.data, pages)
        _adopt(state, state.table[row], remote)
    return None


def _emptied_unless_continued(
    state: KVState, request_id: str, label: str, remote: PublishedStream
) -> Stream:
    """The local stream, empty unless what it stores is the beginning of what was published."""
    table = state.table
    stream = table.get(request_id, label) or table.open(request_id, label)
    if not _same_life(stream, remote) or int(table.released[stream.row]) != remote.released:
        lifecycle.reset(state, stream, free=True)
    drop_chain(state, stream)
    return stream


def _adopt(state: KVState, stream: Stream, remote: PublishedStream) -> None:
    table, row = state.table, stream.row
    table.stored[row] = remote.stored
    table.released[row] = remote.released
    table.protected[row] = remote.protected_prefix
    table.generation[row] += 1
    stream.adopted = (remote.reset_generation, remote.total)
