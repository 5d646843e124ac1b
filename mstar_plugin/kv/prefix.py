"""The prefix index: which sealed page holds which tokens behind which history.

A page is named by a chained SHA-256 key, so two requests share it only if everything before it is
the same too. Integers and bytes only.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mstar_plugin.kv.pages import PagePool

EMPTY_ROOT = b""


class PageItem(NamedTuple):
    """A media item as one page sees it, all counts in slots.

    `start` is its first slot on the page (0 when it began on an earlier one), `earlier` how many of
    its slots earlier pages hold, `length` its whole length, `digest` the identity of its content.
    """

    start: int
    earlier: int
    length: int
    digest: bytes


def page_key(previous: bytes, ids: Sequence[int], items: Iterable[PageItem] = ()) -> bytes:
    """The name of a page: SHA-256 over the previous page's name, its token ids and its media items.

    Every part is preceded by its length, so no two different pages hash the same bytes. `ids` are
    the tokens outside the items, in order, each below 2**32.
    """
    try:
        packed = struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers in 0..2**32-1, got {list(ids)}") from error
    parts = [previous, packed]
    for item in items:
        parts.append(struct.pack("<III", item.start, item.earlier, item.length) + item.digest)
    return _hash(parts)


def fingerprint(root: bytes, key: bytes) -> bytes:
    """`key` as one cache stores it: different roots never share a page."""
    return _hash([root, key])


def cache_root(*identity: str) -> bytes:
    """The root of one cache: model identity, layout, page size, dtype, world size, salt, ..."""
    return _hash([part.encode() for part in identity])


def _hash(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


@dataclass(slots=True)
class _Entry:
    page: int
    parent: bytes
    children: int
    last_use: int


class PrefixIndex:
    """Sealed pages by fingerprinted key, each a child of the page before it.

    The index owns one reference to each of its pages. The first writer of a key wins. Only leaves
    whose page nobody else holds are evicted, the least recently used first; a leaf that turns out
    to be held counts as just used.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def pages(self) -> list[int]:
        """Every page the index holds, one reference each."""
        return [entry.page for entry in self._entries.values()]

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest leading run of `keys` that is indexed; marks them used."""
        pages: list[int] = []
        self._clock += 1
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            self._touch(key, entry)
            pages.append(entry.page)
        return pages

    def insert(self, key: bytes, page: int, parent: bytes = EMPTY_ROOT) -> bool:
        """Seal `page` under `key` behind `parent`; False when another page already has the key.

        The caller keeps its own reference. `parent` must be indexed, or `EMPTY_ROOT` for a first
        page.
        """
        if key in self._entries:
            return False
        if parent != EMPTY_ROOT:
            self._entries[parent].children += 1
        self._clock += 1
        self._pool.retain([page])
        self._pool.seal(page)
        self._entries[key] = _Entry(page, parent, 0, self._clock)
        heapq.heappush(self._leaves, (self._clock, key))
        return True

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, oldest leaves first; returns how many became free."""
        freed = 0
        held: list[bytes] = []
        while freed < num_pages and self._leaves:
            last_use, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or entry.children or entry.last_use != last_use:
                continue
            if self._pool.owners(entry.page) > 1:
                held.append(key)
                continue
            self._drop(key, entry)
            freed += 1
        self._clock += 1
        for key in held:
            self._touch(key, self._entries[key])
        return freed

    def clear(self) -> int:
        """Forget every page, say after new weights; returns pages freed."""
        pages = self.pages()
        self._entries.clear()
        self._leaves.clear()
        return self._pool.release(pages)

    def _touch(self, key: bytes, entry: _Entry) -> None:
        entry.last_use = self._clock
        if not entry.children:
            heapq.heappush(self._leaves, (self._clock, key))
            self._compact()

    def _drop(self, key: bytes, entry: _Entry) -> None:
        del self._entries[key]
        self._pool.release([entry.page])
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                heapq.heappush(self._leaves, (parent.last_use, entry.parent))

    def _compact(self) -> None:
        # Touches leave outdated heap items behind; without this a popular page grows the heap for
        # ever.
        if len(self._leaves) <= 4 * len(self._entries) + 64:
            return
        self._leaves = [(e.last_use, k) for k, e in self._entries.items() if not e.children]
        heapq.heapify(self._leaves)
