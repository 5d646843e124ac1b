"""Moving requests to host memory and back, all labels or none.

The copy out runs without the lock: streams are claimed first, and a claim that a reset or a removal
overtook is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mstar_plugin.kv.cache import KVCache, copy_pages
from mstar_plugin.kv.pages import PagePool
from mstar_plugin.kv.streams import IN_FLIGHT, OFFLOADED, OFFLOADING, STAGED, Stream

if TYPE_CHECKING:
    from mstar_plugin.kv.state import KVState


class HostPool:
    """`num_pages` pages `[L, num_pages + 1, ...]` in host memory, page-locked where CUDA is used.

    Numbered like the device's: host page 0 exists and is never handed out.
    """

    def __init__(self, cache: KVCache, num_pages: int) -> None:
        shape = (cache.data.shape[0], num_pages + 1, *cache.data.shape[2:])
        pinned = cache.data.device.type == "cuda"
        self.data = torch.zeros(shape, dtype=cache.data.dtype, pin_memory=pinned)
        self.pool = PagePool(num_pages + 1)
        self._cache = cache

    def store(self, device_pages: list[int], host_pages: list[int]) -> None:
        if device_pages:
            copy_pages(self._cache.data, device_pages, self.data, host_pages)

    def load(self, host_pages: list[int], device_pages: list[int]) -> None:
        if host_pages:
            copy_pages(self.data, host_pages, self._cache.data, device_pages)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One stream on its way out: the pages that hold its tokens, their copies, its generation."""

    stream: Stream
    device_pages: list[int]
    host_pages: list[int]
    generation: int


def offload(state: KVState, request_id: str) -> int:
    """Copy the request's tokens to the host and free its device pages; returns pages freed.

    0 when there is nothing to gain or it cannot be done now: a step in flight, no room.
    """
    with state.lock:
        claims = _claim(state, request_id)
    if not claims or state.host is None:
        return 0
    moved = False
    try:
        for claim in claims:
            state.host.store(claim.device_pages, claim.host_pages)
        moved = True
    finally:
        with state.lock:
            freed = _finish(state, claims, moved)
    return freed


def reload(state: KVState, request_id: str) -> bool:
    """Bring an offloaded request back, evicting indexed pages if needed; False without room."""
    with state.lock:
        streams = state.table.of_request(request_id)
        away = [stream for stream in streams if state.table.has(stream, OFFLOADED)]
        total = sum(len(stream.host_pages or ()) for stream in away)
        if any(state.table.has(stream, OFFLOADING) for stream in streams):
            return False
        if state.gate is not None and not state.gate.enter(request_id):
            return False
        if state.pages_short(total):
            return False
        for stream in away:
            _bring_back(state, stream)
        return True


def offload_gain(state: KVState, request_id: str) -> int:
    """Device pages that offloading the request would free; 0 when it cannot be offloaded now."""
    streams = state.table.of_request(request_id)
    if not _can_move(state, streams):
        return 0
    return sum(state.pool.num_reclaimable(state.table.page_list(s.row)) for s in streams)


def _can_move(state: KVState, streams: list[Stream]) -> bool:
    busy = IN_FLIGHT | STAGED | OFFLOADING | OFFLOADED
    if state.host is None or any(state.table.has(s, busy) for s in streams):
        return False
    return state.host.pool.can_acquire(sum(len(_stored_pages(state, s)) for s in streams))


def _stored_pages(state: KVState, stream: Stream) -> list[int]:
    count = -(-int(state.table.stored[stream.row]) // state.config.page_size)
    return state.table.page_list(stream.row)[:count]


def _claim(state: KVState, request_id: str) -> list[Claim]:
    streams = state.table.of_request(request_id)
    if state.host is None or not offload_gain(state, request_id):
        return []
    claims = []
    for stream in streams:
        pages = _stored_pages(state, stream)
        copies = state.host.pool.acquire(len(pages))
        generation = int(state.table.generation[stream.row])
        claims.append(Claim(stream, pages, copies, generation))
    state.copying += claims
    state.table.mark([stream.row for stream in streams], OFFLOADING)
    return claims


def _finish(state: KVState, claims: list[Claim], moved: bool) -> int:
    assert state.host is not None, "a claim is only made with a host pool"
    held = [claim for claim in claims if _still_holds(state, claim)]
    state.copying = [claim for claim in state.copying if claim not in claims]
    state.table.unmark([claim.stream.row for claim in held], OFFLOADING)
    if moved and len(held) == len(claims):
        if state.gate is not None:
            state.gate.step_aside(claims[0].stream.request_id)
        return sum(_leave_device(state, claim) for claim in claims)
    for claim in claims:
        state.host.pool.release(claim.host_pages)
    return 0


def _still_holds(state: KVState, claim: Claim) -> bool:
    """Whether nothing happened to the stream since; a later claim has another generation."""
    stream = claim.stream
    return (
        state.table.is_open(stream)
        and state.table.has(stream, OFFLOADING)
        and int(state.table.generation[stream.row]) == claim.generation
    )


def _leave_device(state: KVState, claim: Claim) -> int:
    table, row = state.table, claim.stream.row
    claim.stream.host_pages = claim.host_pages
    table.mark([row], OFFLOADED)
    table.generation[row] += 1
    return state.pool.release(table.drop_pages(row, 0, int(table.num_pages[row])))


def _bring_back(state: KVState, stream: Stream) -> None:
    assert state.host is not None, "only a host pool holds offloaded pages"
    table, copies = state.table, stream.host_pages or []
    pages = state.pool.acquire(len(copies))
    state.host.load(copies, pages)
    table.set_pages(stream.row, pages)
    table.unmark([stream.row], OFFLOADED)
    table.generation[stream.row] += 1
    state.release_host_pages(stream)
