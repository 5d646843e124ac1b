"""How much one stream will hold: its spans, its growth loops and its retention, as integers.

Letters: `S` page size, `P` protected prefix, `B` context budget. A slot is one token's place in a
page; a position is one step of the position counter. An image of 1024 tokens fills 1024 slots and
may be one position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mstar_plugin.kv.retention import dense_tokens


@dataclass(frozen=True)
class RetentionPolicy:
    """Keeps a stream that goes on committing at a bounded length.

    Once the committed tokens behind the first `protected_prefix` exceed `context_budget`, commits
    release the oldest whole pages behind the prefix. The page that straddles the end of the prefix
    and a partial last page always stay, so up to a page more than the budget can be resident; what
    is left over is looked at again by the next commit. Both counts are tokens.
    """

    context_budget: int
    protected_prefix: int = 0

    def __post_init__(self) -> None:
        require_count("context_budget", self.context_budget, 1)
        require_count("protected_prefix", self.protected_prefix, 0)


@dataclass(frozen=True)
class PrefixSpan:
    """One write to a stream.

    `length`: slots the write fills. `advance`: positions it moves the counter by. `walk`: the walk
    that writes it. `scratch`: slots the walk needs beside them during its step only. `digest`: the
    identity of a media item, None for token ids. `end_key`: for an item that ends inside a page,
    the key of that page up to the item's end.
    """

    length: int
    advance: int
    walk: str
    scratch: int = 0
    digest: bytes | None = None
    end_key: bytes | None = None

    def __post_init__(self) -> None:
        require_count("length", self.length, 0)
        require_count("advance", self.advance, 0)
        require_count("scratch", self.scratch, 0)


@dataclass(frozen=True)
class StreamLayout:
    """What one label of a request will hold from its first span to its last iteration.

    `growth` is `((loop, tokens per iteration), ...)`, written after all spans. `scratch`: slots
    used on top of the finished stream and never kept. `keyed_spans`: how many leading spans the
    request's prefix keys cover.
    """

    spans: tuple[PrefixSpan, ...] = ()
    growth: tuple[tuple[str, int], ...] = ()
    scratch: int = 0
    retention: RetentionPolicy | None = None
    keyed_spans: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        object.__setattr__(self, "growth", tuple((loop, tokens) for loop, tokens in self.growth))
        for loop, tokens in self.growth:
            require_count(f"growth of loop {loop!r}", tokens, 0)
        require_count("scratch", self.scratch, 0)
        require_count("keyed_spans", self.keyed_spans, 0)
        if self.keyed_spans > len(self.spans):
            raise ValueError(
                f"keyed_spans must be at most the number of spans, {len(self.spans)}, "
                f"got {self.keyed_spans}"
            )

    def positions(self, caps: Mapping[str, int]) -> int:
        """Positions the finished stream reaches; a loop missing in `caps` runs 0 times.

        Example: spans advancing 300, 1 and 20, growth 1 per "decode", caps {"decode": 500} -> 821.
        """
        return self.base_positions + self._grown(caps)

    def slots(self, caps: Mapping[str, int]) -> int:
        """Most slots the stream fills at one time without retention, scratch included.

        Example: spans of 300, 1024 and 20 slots, growth 1 per "decode", caps {"decode": 500} ->
        1844.
        """
        return max(self.span_peak, self.base_slots + self._grown(caps) + self.scratch)

    def pages(self, caps: Mapping[str, int], page_size: int) -> int:
        """Most pages the stream holds at one time, whatever the order of its steps.

        Without retention `ceil(slots / S)`. With it the stream is a window that `caps` does not
        enlarge: `ceil((max(P + B, ceil(P / S) * S) + S + step) / S)`, where `S` covers what a
        commit may leave over the budget and `step` is the most one write puts behind the prefix,
        its scratch included.
        Example: span 180, growth 3120, P=180, B=6240, S=128 -> 76.
        """
        if self.retention is None:
            return -(-self.slots(caps) // page_size)
        policy = self.retention
        peak = dense_tokens(policy.context_budget, policy.protected_prefix, page_size)
        step = max(self._steps_past(policy.protected_prefix))
        return -(-(peak + page_size + step) // page_size)

    @property
    def base_positions(self) -> int:
        """Positions of the spans alone."""
        return sum(span.advance for span in self.spans)

    @property
    def base_slots(self) -> int:
        """Slots the spans alone keep."""
        return sum(span.length for span in self.spans)

    @property
    def span_peak(self) -> int:
        """Most slots in use while the spans are written, each with its own scratch on top."""
        ends = accumulate(span.length for span in self.spans)
        return max(
            (end + span.scratch for end, span in zip(ends, self.spans, strict=True)), default=0
        )

    def growth_of(self, loop: str) -> int:
        """Tokens one iteration of `loop` adds; 0 when the stream does not grow with it."""
        return sum(tokens for name, tokens in self.growth if name == loop)

    @classmethod
    def from_row(cls, row: StreamLayout | Sequence[Any]) -> StreamLayout:
        """The layout of a plain row `[spans, growth, scratch, retention, keyed_spans]`, trailing
        defaults left out.

        Each span is a row of `PrefixSpan`'s fields in order, retention a row of `RetentionPolicy`'s
        or None. Instances are accepted in every place. `ValueError` or `TypeError` when a row does
        not fit.
        """
        if isinstance(row, StreamLayout):
            return row
        spans, *rest = row if row else [()]
        if len(rest) > 2 and rest[2] is not None and not isinstance(rest[2], RetentionPolicy):
            rest[2] = RetentionPolicy(*rest[2])
        return cls(tuple(s if isinstance(s, PrefixSpan) else PrefixSpan(*s) for s in spans), *rest)

    def _grown(self, caps: Mapping[str, int]) -> int:
        return sum(tokens * caps.get(loop, 0) for loop, tokens in self.growth)

    def _steps_past(self, protected_prefix: int) -> Iterator[int]:
        yield self.scratch
        yield from (tokens for _, tokens in self.growth)
        end = 0
        for span in self.spans:
            end += span.length
            yield min(span.length, end - protected_prefix) + span.scratch


def require_count(name: str, value: int, minimum: int) -> None:
    """`ValueError` unless `value` is an int (not bool) of at least `minimum`."""
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
