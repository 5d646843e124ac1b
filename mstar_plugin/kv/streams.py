"""Stream state as parallel integer arrays, so that a step's bookkeeping is a few array operations.

Row 0 is the null stream: nothing stored, every page the sink. Padding rows and streams that were
removed in mid-step point there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mstar_plugin.kv.chain import KeyChain

IntArray = npt.NDArray[np.int64]

NULL_ROW = 0
IN_FLIGHT = 1
STAGED = 2
OFFLOADING = 4
OFFLOADED = 8
LEASED = 16
KEYED = 32
RETAINED = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """Indexed pages held for a stream that has stored nothing yet.

    `tokens` they cover from the start; `partial` is a page whose first `tokens % S` slots are to be
    copied behind the whole `pages`.
    """

    tokens: int
    pages: tuple[int, ...]
    partial: int | None = None

    @property
    def references(self) -> list[int]:
        return [*self.pages, *(() if self.partial is None else (self.partial,))]


@dataclass(slots=True, eq=False)
class Stream:
    """What a stream has beside its row: identity, names of its pages, copies on the host.

    `adopted`: of a stream taken over from another manager, the reset generation there and the
    tokens that had been committed.
    """

    row: int
    request_id: str
    label: str
    chain: KeyChain | None = None
    lease: Lease | None = None
    host_pages: list[int] | None = None
    reset_generation: int = 0
    adopted: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"label {self.label!r} of request {self.request_id!r}"


_COUNTERS = ("stored", "released", "protected", "num_pages", "generation", "covered", "laid_out")


class StreamTable:
    """Every open stream: counters `int64 [rows]` and page ids `int32 [rows, width]`.

    `stored` tokens resident, `released` tokens dropped, `protected` prefix in tokens, `num_pages`
    held, `covered` tokens the key chain knows, `laid_out` tokens whose walks are declared. Arrays
    are replaced when they grow: read them anew in every operation. `rows` finds a stream by request
    and label, `by_label` by label and request; `version` changes when either does.
    """

    stored: IntArray
    released: IntArray
    protected: IntArray
    num_pages: IntArray
    generation: IntArray
    covered: IntArray
    laid_out: IntArray

    def __init__(self) -> None:
        self._capacity = 64
        for name in _COUNTERS:
            setattr(self, name, np.zeros(self._capacity, dtype=np.int64))
        self.flags = np.zeros(self._capacity, dtype=np.uint8)
        self.pages = np.zeros((self._capacity, 16), dtype=np.int32)
        self.rows: dict[str, dict[str, int]] = {}
        self.by_label: dict[str, dict[str, int]] = {}
        self._streams: list[Stream | None] = [None] * self._capacity
        self._free = list(range(self._capacity - 1, NULL_ROW, -1))
        self._num_opened = 0
        self.version = 0

    def __iter__(self) -> Iterator[Stream]:
        return (stream for stream in self._streams if stream is not None)

    def __getitem__(self, row: int) -> Stream:
        stream = self._streams[row]
        assert stream is not None, f"row {row} holds no stream"
        return stream

    def get(self, request_id: str, label: str) -> Stream | None:
        row = self.rows.get(request_id, {}).get(label)
        return None if row is None else self._streams[row]

    def of_request(self, request_id: str) -> list[Stream]:
        return [self[row] for row in self.rows.get(request_id, {}).values()]

    def is_open(self, stream: Stream) -> bool:
        return self._streams[stream.row] is stream

    def open(self, request_id: str, label: str) -> Stream:
        """A new, empty stream; its generation differs from every earlier stream's of that name."""
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        stream = Stream(row, request_id, label)
        self._streams[row] = stream
        self.rows.setdefault(request_id, {})[label] = row
        self.by_label.setdefault(label, {})[request_id] = row
        self._num_opened += 1
        self.version += 1
        self.generation[row] = self._num_opened << 32
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream whose pages have been given back."""
        row = stream.row
        for name in _COUNTERS:
            getattr(self, name)[row] = 0
        self.flags[row] = 0
        self.pages[row] = 0
        self._streams[row] = None
        self.version += 1
        self._free.append(row)
        del self.rows[stream.request_id][stream.label]
        del self.by_label[stream.label][stream.request_id]

    def page_list(self, row: int) -> list[int]:
        page_ids: list[int] = self.pages[row, : self.num_pages[row]].tolist()
        return page_ids

    def append_pages(self, row: int, pages: Sequence[int]) -> None:
        held = int(self.num_pages[row])
        self._grow_width(held + len(pages))
        self.pages[row, held : held + len(pages)] = pages
        self.num_pages[row] = held + len(pages)

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Replace the page list, leaving the sink behind its end."""
        self.pages[row] = 0
        self.num_pages[row] = 0
        self.append_pages(row, pages)

    def drop_pages(self, row: int, first: int, count: int) -> list[int]:
        """Take `count` pages out of the list from index `first` on and return them."""
        pages = self.page_list(row)
        self.set_pages(row, pages[:first] + pages[first + count :])
        return pages[first : first + count]

    def mark(self, rows: IntArray | list[int], flag: int) -> None:
        self.flags[rows] |= np.uint8(flag)
        self.flags[NULL_ROW] = 0

    def unmark(self, rows: IntArray | list[int], flag: int) -> None:
        self.flags[rows] &= np.uint8(0xFF ^ flag)

    def has(self, stream: Stream, flag: int) -> bool:
        return bool(self.flags[stream.row] & flag)

    def _grow_rows(self) -> None:
        old, self._capacity = self._capacity, 2 * self._capacity
        for name in (*_COUNTERS, "flags", "pages"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._streams += [None] * old
        self._free = list(range(self._capacity - 1, old - 1, -1))

    def _grow_width(self, needed: int) -> None:
        width = self.pages.shape[1]
        if needed > width:
            more = max(needed, 2 * width) - width
            self.pages = np.pad(self.pages, ((0, 0), (0, more)))
