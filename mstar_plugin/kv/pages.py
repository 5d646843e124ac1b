"""The page pool: which page is free, who owns the others, and which may never be written again.

Integers only; the tensors behind the pages live in `kv/cache.py`. Page 0 is the sink: reserved when
the pool is built, never handed out, and the target of every write that nobody will read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SINK_PAGE = 0


class PagePool:
    """Free list, owner counts and seals of `max_num_pages` pages.

    A page goes back to the free list when its last owner lets go of it. A sealed page is immutable
    and may have several owners; the seal goes with the last owner. The pool has no lock of its own:
    the manager's covers it.
    """

    def __init__(self, max_num_pages: int) -> None:
        if max_num_pages < 2:
            raise ValueError(
                "max_num_pages must be at least 2, the sink page and one page to use, "
                f"got {max_num_pages}"
            )
        self.max_num_pages = max_num_pages
        self._free = list(range(max_num_pages - 1, SINK_PAGE, -1))
        self._owners = [0] * max_num_pages
        self._owners[SINK_PAGE] = 1
        self._sealed = bytearray(max_num_pages)
        self._num_idle_sealed = 0

    @property
    def num_usable(self) -> int:
        """Pages that can ever be handed out: all but the sink."""
        return self.max_num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle_sealed(self) -> int:
        """Sealed pages with one owner: at most this many can the prefix index evict."""
        return self._num_idle_sealed

    def can_acquire(self, num_pages: int) -> bool:
        return num_pages <= len(self._free)

    def acquire(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages, each with one owner. Ask `can_acquire` first."""
        if not self.can_acquire(num_pages):
            raise RuntimeError(f"acquire needs {num_pages} free pages and {self.num_free} are free")
        if num_pages <= 0:
            return []
        pages = self._free[-num_pages:][::-1]
        del self._free[-num_pages:]
        for page in pages:
            self._owners[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to each page; only a page somebody owns can be retained."""
        for page in pages:
            owners = self._owners[page]
            if owners == 0 or page == SINK_PAGE:
                raise RuntimeError(f"page {page} has no owner to share it with")
            self._num_idle_sealed -= self._sealed[page] and owners == 1
            self._owners[page] = owners + 1

    def release(self, pages: Iterable[int]) -> int:
        """Drop one owner of each page and return how many became free."""
        freed = 0
        for page in pages:
            owners = self._owners[page] - 1
            if owners < 0 or page == SINK_PAGE:
                raise RuntimeError(f"page {page} was released by somebody who does not own it")
            self._owners[page] = owners
            if self._sealed[page] and owners < 2:
                self._num_idle_sealed += 1 if owners else -1
            if owners == 0:
                self._sealed[page] = 0
                self._free.append(page)
                freed += 1
        return freed

    def seal(self, page: int) -> None:
        """Make an owned page immutable until its last owner lets go of it."""
        if self._owners[page] == 0 or page == SINK_PAGE:
            raise RuntimeError(f"page {page} has no owner and cannot be sealed")
        if not self._sealed[page]:
            self._sealed[page] = 1
            self._num_idle_sealed += self._owners[page] == 1

    def is_sealed(self, page: int) -> bool:
        return bool(self._sealed[page])

    def owners(self, page: int) -> int:
        return self._owners[page]

    def writable(self, pages: Iterable[int]) -> list[int]:
        """The pages a sole owner may overwrite, in the given order: unsealed, one owner."""
        return [page for page in pages if not self._sealed[page] and self._owners[page] == 1]

    def num_reclaimable(self, pages: Iterable[int]) -> int:
        """How many of `pages` would become free if one owner of each let go."""
        return sum(1 for page in pages if self._owners[page] == 1)

    def assert_conserved(self, references: Sequence[int]) -> None:
        """Compare the pool with every reference held outside, one entry per owner.

        free + owned + sink must be all pages, the owners of a page must be the references to it,
        and a free page must be unsealed.
        """
        held = Counter(references)
        assert SINK_PAGE not in held, "the sink page is in somebody's page list"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert not free & held.keys(), f"pages {sorted(free & held.keys())} are free and owned"
        lost = set(range(1, self.max_num_pages)) - free - held.keys()
        assert not lost, f"pages {sorted(lost)} are neither free nor owned"
        wrong = {p: (self._owners[p], n) for p, n in held.items() if self._owners[p] != n}
        assert not wrong, f"owner counts differ from the references held: {wrong}"
        stale = [p for p in free if self._owners[p] or self._sealed[p]]
        assert not stale, f"free pages {stale} still have an owner or a seal"
        idle = sum(1 for p in held if self._sealed[p] and self._owners[p] == 1)
        assert idle == self._num_idle_sealed, (
            f"{idle} sealed pages have one owner, {self._num_idle_sealed} counted"
        )
