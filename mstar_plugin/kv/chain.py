"""The key chain of one stream: what its pages are called, and up to where that is known.

`prompt_keys` names the pages of a prompt before a request starts; `KeyChain` follows the stream
from there and stops for good at the first write it cannot name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mstar_plugin.kv.layout import PrefixSpan
from mstar_plugin.kv.prefix import EMPTY_ROOT, PageItem, page_key


class MediaItem(NamedTuple):
    """A media item of a prompt: its first slot in the stream, its slots, its content's identity."""

    start: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


class PromptKeys(NamedTuple):
    """What a request declares about a prompt.

    `keys`: one per page, a last partial page included. `tail`: token ids behind the last whole
    page. `end_keys`: end slot of each item that ends inside a page -> name of that page up to
    there.
    """

    keys: list[bytes]
    tail: list[int]
    end_keys: dict[int, bytes]


def prompt_keys(ids: Sequence[int], page_size: int, items: Sequence[MediaItem] = ()) -> PromptKeys:
    """Name the pages of a prompt whose slots hold `items` and, everywhere else, `ids` in order.

    Example: 10 ids, page size 4, no items -> 3 keys (4, 4 and 2 tokens), tail = the last 2 ids.
    """
    total = len(ids) + sum(item.length for item in items)
    keys: list[bytes] = []
    end_keys: dict[int, bytes] = {}
    used = 0
    first_tail_id = 0
    for start in range(0, total, page_size):
        stop = min(start + page_size, total)
        previous = keys[-1] if keys else EMPTY_ROOT
        count = ids_between(items, start, stop)
        first_tail_id = used
        for item in items:
            if start < item.end < stop or item.end == stop < start + page_size:
                head = ids[used : used + ids_between(items, start, item.end)]
                end_keys[item.end] = page_key(previous, head, items_between(items, start, item.end))
        keys.append(page_key(previous, ids[used : used + count], items_between(items, start, stop)))
        used += count
    tail = [] if total % page_size == 0 else list(ids[first_tail_id:])
    return PromptKeys(keys, tail, end_keys)


def items_between(items: Sequence[MediaItem], start: int, stop: int) -> list[PageItem]:
    """The items with slots in `start..stop-1`, as a page that begins at `start` sees them."""
    return [
        PageItem(max(item.start - start, 0), max(start - item.start, 0), item.length, item.digest)
        for item in items
        if item.start < stop and item.end > start
    ]


def ids_between(items: Sequence[MediaItem], start: int, stop: int) -> int:
    """How many of the slots `start..stop-1` hold token ids."""
    media = (min(item.end, stop) - max(item.start, start) for item in items)
    return stop - start - sum(slots for slots in media if slots > 0)


class KeyChain:
    """Names of a stream's whole pages, extended as sampled ids become known.

    `covered` counts the leading tokens whose content the chain knows. Without `spans` the length of
    the prompt follows from `keys` and `tail`.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        page_size: int,
        tail: Sequence[int] | None = None,
        spans: Sequence[PrefixSpan] = (),
        keyed_spans: int | None = None,
    ) -> None:
        ends = list(accumulate(span.length for span in spans))
        keyed = len(spans) if keyed_spans is None else keyed_spans
        self.page_size = page_size
        self.covered = _prompt_tokens(len(keys), page_size, tail, ends[:keyed])
        self.max_lookup_pages = max(len(keys) - 1, 0)
        self.num_sealed = 0
        self._laid_out = [(e - s.length, e, s.walk) for s, e in zip(spans, ends, strict=True)]
        media = [(s, e) for s, e in zip(spans[:keyed], ends, strict=False) if s.digest is not None]
        self._items = [MediaItem(e - s.length, s.length, s.digest or b"") for s, e in media]
        self.item_ends = [
            (e, s.end_key) for s, e in media if s.end_key is not None and e % page_size
        ]
        self.prompt_tokens = self.covered
        whole = self.covered // page_size
        self._keys = list(keys[:whole])
        self._pending = list(tail or ())
        complete = self._tail_is_complete(whole * page_size)
        told = tail is not None or bool(ends)
        self._extendable = complete and told and keyed == len(spans)

    def _tail_is_complete(self, start: int) -> bool:
        complete = ids_between(self._items, start, self.covered) == len(self._pending)
        if not complete:
            self.covered = start
        return complete

    def follow(self, start: int, num_tokens: int, walk: str | None) -> bool:
        """Whether the chain still names the stream after a write of `num_tokens` at `start`.

        It does when the write begins in what is covered and, where spans are laid out, comes from
        their walk. A write that ends beyond ends what can be named: its last tokens are unknown.
        """
        if start > self.covered:
            return False
        if start + num_tokens > self.covered:
            self._extendable = False
        return walk is None or all(
            walk == owner
            for first, end, owner in self._laid_out
            if first < start + num_tokens and end > start
        )

    def extend(self, ids: Sequence[int]) -> bool:
        """Append sampled ids; False when the chain does not know what comes before them."""
        if self._extendable:
            self._pending.extend(ids)
            self.covered += len(ids)
        return self._extendable

    def lookup_keys(self) -> list[bytes]:
        """Names of the prompt pages a lookup may use: all but the last, so that tokens are left."""
        return self._keys[: self.max_lookup_pages]

    def key(self, page: int) -> bytes | None:
        """The name of whole page `page`, or None while some of its tokens are unknown."""
        while page >= len(self._keys) and self._name_next_page():
            pass
        return self._keys[page] if page < len(self._keys) else None

    def _name_next_page(self) -> bool:
        start = len(self._keys) * self.page_size
        stop = start + self.page_size
        if self.covered < stop:
            return False
        count = ids_between(self._items, start, stop)
        ids, self._pending = self._pending[:count], self._pending[count:]
        previous = self._keys[-1] if self._keys else EMPTY_ROOT
        self._keys.append(page_key(previous, ids, items_between(self._items, start, stop)))
        return True


def _prompt_tokens(
    num_keys: int, page_size: int, tail: Sequence[int] | None, keyed_ends: Sequence[int]
) -> int:
    if keyed_ends:
        total = keyed_ends[-1]
        if num_keys != -(-total // page_size):
            raise ValueError(
                f"prefix_keys must have one key per page, {-(-total // page_size)} for the "
                f"{total} tokens of the keyed spans, got {num_keys}"
            )
        return total
    if tail == []:
        return num_keys * page_size
    return max(num_keys - 1, 0) * page_size + len(tail or ())
