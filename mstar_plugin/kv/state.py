"""What every part of the manager works on: pages, streams, index and the steps in flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar_plugin.kv.cache import KVCache
from mstar_plugin.kv.config import KVReqConfig, PagedKVConfig
from mstar_plugin.kv.flight import Flight
from mstar_plugin.kv.offload import Claim, HostPool
from mstar_plugin.kv.pages import PagePool
from mstar_plugin.kv.prefix import PrefixIndex
from mstar_plugin.kv.reservation import AdmissionGate, AdmissionPolicy, iterations_left
from mstar_plugin.kv.streams import Stream, StreamTable


@dataclass(slots=True, eq=False)
class KVState:
    """`index` is None when pages are not shared, `host` when nothing is offloaded, `gate` when
    whole requests are not reserved for. `lock` guards everything here but the contents of `cache`
    and `host`.

    `flights` are admitted steps, `staged` the one admitted ahead of time, `copying` the streams on
    their way to the host.
    """

    config: PagedKVConfig
    cache: KVCache
    pool: PagePool
    index: PrefixIndex | None
    root: bytes
    host: HostPool | None
    gate: AdmissionGate | None
    table: StreamTable = field(default_factory=StreamTable)
    requests: dict[str, KVReqConfig] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)
    staged: Flight | None = None
    copying: list[Claim] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def open_gate(self, policy: AdmissionPolicy, padding_pages: int) -> None:
        """Reserve for whole requests from now on, of all pages but the sink and the padding's."""
        capacity = self.pool.num_usable - padding_pages
        self.gate = AdmissionGate(capacity, policy, self._pages_of, self._iterations_left)

    def _pages_of(self, request_id: str) -> int:
        return sum(int(self.table.num_pages[s.row]) for s in self.table.of_request(request_id))

    def _iterations_left(self, request_id: str) -> int:
        counts = {
            stream.label: int(self.table.stored[stream.row] + self.table.released[stream.row])
            for stream in self.table.of_request(request_id)
        }
        return iterations_left(self.requests[request_id], counts)

    def pages_short(self, num_pages: int) -> int:
        """Free `num_pages` pages, evicting indexed ones if needed; returns how many are missing.

        Nothing is evicted when even that would not be enough.
        """
        missing = num_pages - self.pool.num_free
        if missing <= 0:
            return 0
        if self.index is None or missing > self.pool.num_idle_sealed:
            return missing - self.pool.num_idle_sealed
        return missing - self.index.evict(missing)

    def give_back(self, stream: Stream, pages: Sequence[int]) -> None:
        """Release pages of a stream; those that a step in flight may still write wait for its end.

        Otherwise another request could be handed a page while the forward writes to it.
        """
        for flight in self.flights:
            if stream.row in flight.touched_rows():
                flight.fenced.extend(pages)
                return
        self.pool.release(pages)

    def release_host_pages(self, stream: Stream) -> None:
        if stream.host_pages is not None and self.host is not None:
            self.host.pool.release(stream.host_pages)
            stream.host_pages = None

    def references(self) -> list[int]:
        """Every page reference held outside the pool, one entry each."""
        held = [page for stream in self.table for page in self.table.page_list(stream.row)]
        held += [page for s in self.table if s.lease for page in s.lease.references]
        for flight in self.flights + ([self.staged] if self.staged else []):
            held += flight.fenced
            held += [lease.partial for _, lease in flight.leases if lease.partial is not None]
        return held + (self.index.pages() if self.index is not None else [])

    def assert_conserved(self) -> None:
        """Every page is accounted for and every stream can hold what it says it stores."""
        self.pool.assert_conserved(self.references())
        size = self.config.page_size
        owners: dict[int, Stream] = {}
        host_pages = [page for claim in self.copying for page in claim.host_pages]
        for stream in self.table:
            pages = self.table.page_list(stream.row)
            stored = int(self.table.stored[stream.row])
            host_pages += stream.host_pages or []
            room = len(pages if stream.host_pages is None else stream.host_pages)
            assert room * size >= stored, f"{stream} stores {stored} tokens on {room} pages"
            open_pages = pages[stored // size :]
            shared_pages = set(open_pages) - set(self.pool.writable(open_pages))
            assert not shared_pages, f"{stream} would write to the shared pages {shared_pages}"
            for page in pages:
                shared = page in owners and not self.pool.is_sealed(page)
                assert not shared, f"page {page} is in {owners[page]} and {stream}, unsealed"
                owners[page] = stream
        if self.host is not None:
            self.host.pool.assert_conserved(host_pages)
