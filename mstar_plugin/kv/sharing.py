"""Streams and the prefix index: what a new stream may take over, and what a commit offers."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_plugin.kv.chain import KeyChain
from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.prefix import EMPTY_ROOT, PrefixIndex, fingerprint
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import IN_FLIGHT, KEYED, LEASED, RETAINED, STAGED, Lease, Stream


def start_chain(state: KVState, stream: Stream) -> None:
    """Name the stream's pages from what its request declared, if it takes part in sharing."""
    drop_chain(state, stream)
    config = state.requests[stream.request_id]
    keys = (config.prefix_keys or {}).get(stream.label)
    if state.index is None or not config.prefix_cache or not keys:
        return
    layout = (config.kv_layout or {}).get(stream.label)
    chain = KeyChain(
        keys,
        state.config.page_size,
        (config.prefix_tail or {}).get(stream.label),
        layout.spans if layout else (),
        layout.keyed_spans if layout else None,
    )
    stream.chain = chain
    state.table.covered[stream.row] = chain.covered
    state.table.laid_out[stream.row] = layout.base_slots if layout else 0
    state.table.mark([stream.row], KEYED)


def drop_chain(state: KVState, stream: Stream) -> None:
    """Offer nothing of this stream from now on; what is indexed stays indexed."""
    stream.chain = None
    state.table.unmark([stream.row], KEYED)


def drop_lease(state: KVState, stream: Stream) -> None:
    if stream.lease is not None:
        state.pool.release(stream.lease.references)
        stream.lease = None
        state.table.unmark([stream.row], LEASED)


def extend_chain(state: KVState, stream: Stream, ids: Sequence[int]) -> None:
    """Tell the chain the sampled ids that the stream's next commits write."""
    if stream.chain is not None and stream.chain.extend(ids):
        state.table.covered[stream.row] = stream.chain.covered


def lease_prefix(state: KVState, stream: Stream) -> int:
    """Hold the indexed pages that begin this stream; returns the tokens they cover.

    Asked again, the answer stays the same for as long as the lease is held. 0 for a stream that
    has stored something, is in its first step, or has no keys.
    """
    if stream.lease is not None:
        return stream.lease.tokens
    begun = state.table.stored[stream.row] or state.table.has(stream, IN_FLIGHT | STAGED)
    if stream.chain is None or state.index is None or begun:
        return 0
    lease = _match(state, state.index, stream.chain, _dense_tokens(state, stream))
    if not lease.tokens:
        return 0
    state.pool.retain(lease.references)
    stream.lease = lease
    state.table.mark([stream.row], LEASED)
    return lease.tokens


def trim_lease(state: KVState, stream: Stream, num_tokens: int) -> int:
    """Keep at most `num_tokens` of the lease, in whole pages; returns the tokens still held."""
    lease = stream.lease
    if lease is None or num_tokens >= lease.tokens:
        return 0 if lease is None else lease.tokens
    kept = lease.pages[: num_tokens // state.config.page_size]
    state.pool.retain(kept)
    drop_lease(state, stream)
    if kept:
        stream.lease = Lease(len(kept) * state.config.page_size, kept)
        state.table.mark([stream.row], LEASED)
    return len(kept) * state.config.page_size


def index_written(
    state: KVState, stream: Stream, before: int, after: int, walk: str | None
) -> None:
    """Offer the pages that a commit of the tokens `before..after-1` filled."""
    chain, index = stream.chain, state.index
    if chain is None or index is None:
        return
    if not chain.follow(before, after - before, walk):
        drop_chain(state, stream)
        return
    usable = after
    if state.table.has(stream, RETAINED):
        usable = min(after, int(state.table.protected[stream.row]))
    pages = state.table.page_list(stream.row)
    _index_whole_pages(state, index, chain, pages[: usable // state.config.page_size])
    for end, key in chain.item_ends:
        if before < end <= usable:
            _index_item_end(state, index, chain, pages[end // state.config.page_size], end, key)


def _match(state: KVState, index: PrefixIndex, chain: KeyChain, limit: int | None) -> Lease:
    size = state.config.page_size
    keys = chain.lookup_keys()
    if limit is not None:
        keys = keys[: limit // size]
    pages = index.lookup(fingerprint(state.root, key) for key in keys)
    whole = len(pages) * size
    for end, key in sorted(chain.item_ends, reverse=True):
        fits = whole < end < min(whole + size, chain.prompt_tokens)
        if fits and (limit is None or end <= limit):
            partial = index.lookup([fingerprint(state.root, key)])
            if partial:
                return Lease(end, tuple(pages), partial[0])
    return Lease(whole, tuple(pages))


def _dense_tokens(state: KVState, stream: Stream) -> int | None:
    """Under a policy, the tokens that are computed as if there were none."""
    layout = (state.requests[stream.request_id].kv_layout or {}).get(stream.label)
    policy: RetentionPolicy | None = layout.retention if layout else None
    return None if policy is None else policy.protected_prefix + policy.context_budget


def _index_whole_pages(
    state: KVState, index: PrefixIndex, chain: KeyChain, pages: list[int]
) -> None:
    first = min(chain.num_sealed, len(pages))
    # A page evicted since it was offered is offered again: later ones could not be found without.
    while first and fingerprint(state.root, chain.key(first - 1) or b"") not in index:
        first -= 1
    for number in range(first, len(pages)):
        key = chain.key(number)
        if key is None:
            return
        index.insert(fingerprint(state.root, key), pages[number], _parent(state, chain, number))
        chain.num_sealed = number + 1


def _index_item_end(
    state: KVState, index: PrefixIndex, chain: KeyChain, page: int, end: int, key: bytes
) -> None:
    parent = _parent(state, chain, end // state.config.page_size)
    rooted = fingerprint(state.root, key)
    orphan = parent != EMPTY_ROOT and parent not in index
    if orphan or rooted in index or not state.pool.can_acquire(1):
        return
    copies = state.pool.acquire(1)
    state.cache.copy_pages([page], copies)
    index.insert(rooted, copies[0], parent)
    state.pool.release(copies)


def _parent(state: KVState, chain: KeyChain, page: int) -> bytes:
    key = chain.key(page - 1) if page else None
    return EMPTY_ROOT if key is None else fingerprint(state.root, key)
