"""A step between admission and commit: its rows as arrays, and what admission took for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from torch import Tensor

from mstar_plugin.kv.config import KVStep
from mstar_plugin.kv.plan import KVPlanOutputs, group_by_plan_label
from mstar_plugin.kv.streams import NULL_ROW, IntArray, Lease, Stream, StreamTable
from mstar_plugin.step import Segment, StepContext

ForkPair = tuple[Stream, Stream]
Name = tuple[str, str]


@dataclass(slots=True, eq=False)
class Flight:
    """One admitted step. Arrays are in packed order, plan label after plan label.

    `names`: request and label of each segment. `rows`: the table row it writes to, the null row for
    padding, sinks and streams removed since. `readers`: the row its stored length comes from, which
    a sink keeps. `spans`: its tokens; `decode`: one each. `groups`: plan label -> its part of the
    arrays. `writes`: plan label -> cache row of each token. `table_version`: when the rows held.
    """

    step: KVStep
    slot: int
    segments: Sequence[Segment]
    names: list[Name]
    groups: dict[str, slice]
    rows: IntArray
    readers: IntArray
    spans: IntArray
    decode: bool
    table_version: int
    opened: list[Stream] = field(default_factory=list)
    acquired: list[tuple[Stream, int]] = field(default_factory=list)
    leases: list[tuple[Stream, Lease]] = field(default_factory=list)
    pre_forks: list[ForkPair] = field(default_factory=list)
    post_forks: list[ForkPair] = field(default_factory=list)
    forked: bool = False
    fenced: list[int] = field(default_factory=list)
    outputs: KVPlanOutputs | None = None
    planned_ahead: bool = False
    writes: dict[str, Tensor] = field(default_factory=dict)

    def is_for(self, step: KVStep, ctx: StepContext) -> bool:
        """Whether this is the flight of that step: an equal step in the same slot."""
        return self.slot == ctx.slot and (self.step is step or self.step == step)

    def forked_streams(self) -> list[Stream]:
        return [stream for pair in self.pre_forks + self.post_forks for stream in pair]

    def touched_rows(self) -> IntArray:
        """Rows of every stream the step reads or writes."""
        if not self.pre_forks and not self.post_forks:
            return self.rows
        extra = [stream.row for stream in self.forked_streams()]
        return np.concatenate([self.rows, np.array(extra, dtype=np.int64)])

    def forget(self, stream: Stream) -> None:
        """Leave a stream out of what is still to come: it is being removed or reset."""
        self.table_version = -1
        self.rows = np.where(self.rows == stream.row, NULL_ROW, self.rows)
        self.readers = np.where(self.readers == stream.row, NULL_ROW, self.readers)
        self.pre_forks = [pair for pair in self.pre_forks if stream not in pair]
        self.post_forks = [pair for pair in self.post_forks if stream not in pair]
        self.opened = [other for other in self.opened if other is not stream]
        self.acquired = [taken for taken in self.acquired if taken[0] is not stream]
        self.leases = [lease for lease in self.leases if lease[0] is not stream]


def resolve(
    step: KVStep, ctx: StepContext, table: StreamTable, last: Flight | None = None
) -> Flight:
    """The step as arrays; streams used for the first time are opened and noted in the flight.

    The arrays of the `last` flight serve again when the step has the same segments, as one decode
    step after another does. `ValueError` or `KeyError`, with nothing opened, for a step that can
    never run.
    """
    if last is not None and _repeats(step, ctx, table, last):
        return Flight(
            step=step,
            slot=ctx.slot,
            segments=last.segments,
            names=last.names,
            groups=last.groups,
            rows=last.rows,
            readers=last.readers,
            spans=last.spans,
            decode=last.decode,
            table_version=last.table_version,
        )
    if step.segments is None:
        raise ValueError("segments of a KV step must be given, got None: name them or its step's")
    segments, groups = _packed(step, step.segments)
    request_ids, labels, spans = zip(*segments, strict=True) if segments else ((), (), ())
    if min(spans, default=0) < 0:
        raise ValueError(f"spans must be 0 or more, got {min(spans)}")
    if step.pre_forks or step.post_forks:
        _check_forks(step, ctx, segments, table)
    names = list(zip(request_ids, labels, strict=True))
    opened: list[Stream] = []
    readers = _rows(step, ctx, request_ids, labels, table, opened)
    flight = Flight(
        step=step,
        slot=ctx.slot,
        segments=segments,
        names=names,
        groups=groups,
        rows=_without_sinks(names, step.sink, readers),
        readers=readers,
        spans=_array(spans),
        decode=spans.count(1) == len(spans),
        table_version=table.version,
        opened=opened,
    )
    flight.pre_forks = _fork_pairs(step, step.pre_forks, ctx, table, opened)
    if step.commit:
        flight.post_forks = _fork_pairs(step, step.post_forks, ctx, table, opened)
    return flight


def _repeats(step: KVStep, ctx: StepContext, table: StreamTable, last: Flight) -> bool:
    before = last.step
    special = step.sink or step.pre_forks or step.post_forks
    special = special or before.sink or before.pre_forks or before.post_forks
    return (
        last.table_version == table.version
        and not special
        and not _padding_ids(ctx)
        and step.segments == before.segments
        and step.combined_labels == before.combined_labels
    )


def _packed(
    step: KVStep, segments: tuple[Segment, ...]
) -> tuple[Sequence[Segment], dict[str, slice]]:
    """The segments in packed order, and the part of each plan label."""
    labels = set(map(itemgetter(1), segments))
    if len(labels) == 1 and not step.combined_labels:
        return segments, {labels.pop(): slice(0, len(segments))}
    packed: list[Segment] = []
    groups: dict[str, slice] = {}
    for label, members in group_by_plan_label(segments, step.combined_labels).items():
        groups[label] = slice(len(packed), len(packed) + len(members))
        packed += members
    return packed, groups


def _padding_ids(ctx: StepContext) -> frozenset[str]:
    if len(ctx.padded_request_ids) == len(ctx.request_ids):
        return frozenset()
    return frozenset(ctx.padded_request_ids) - frozenset(ctx.request_ids)


def _check_forks(
    step: KVStep, ctx: StepContext, segments: Sequence[Segment], table: StreamTable
) -> None:
    for request_id in _forking_ids(step, ctx):
        labels = {s.label for s in segments if s.request_id == request_id}
        labels |= table.rows.get(request_id, {}).keys()
        for source, target in (*step.pre_forks, *step.post_forks):
            if source == target or source not in labels:
                raise ValueError(
                    f"a fork must copy an open label to another one, request {request_id!r} "
                    f"has {sorted(labels)}, got {source!r} to {target!r}"
                )
            labels.add(target)


def _forking_ids(step: KVStep, ctx: StepContext) -> list[str]:
    only = step.fork_rids
    return [rid for rid in ctx.request_ids if only is None or rid in only]


def _array(spans: Sequence[int]) -> IntArray:
    if spans and spans.count(spans[0]) == len(spans):
        return np.full(len(spans), spans[0], dtype=np.int64)
    return np.array(spans, dtype=np.int64)


def _rows(
    step: KVStep,
    ctx: StepContext,
    request_ids: Sequence[str],
    labels: Sequence[str],
    table: StreamTable,
    opened: list[Stream],
) -> IntArray:
    padding = _padding_ids(ctx)
    try:
        if padding:
            raise KeyError
        rows = _open_rows(request_ids, labels, table)
    except KeyError:
        names = list(zip(request_ids, labels, strict=True))
        _check_names(names, padding, table)
        rows = [_row(name, padding, step.sink, table, opened) for name in names]
    if len(set(rows)) != len(rows):
        _check_names(list(zip(request_ids, labels, strict=True)), padding, table)
    return np.array(rows, dtype=np.int64)


def _open_rows(request_ids: Sequence[str], labels: Sequence[str], table: StreamTable) -> list[int]:
    """Rows of streams that are all open; `KeyError` otherwise."""
    if labels and labels.count(labels[0]) == len(labels):
        return list(map(table.by_label[labels[0]].__getitem__, request_ids))
    by_label = table.by_label
    return [by_label[label][name] for name, label in zip(request_ids, labels, strict=True)]


def _check_names(names: Sequence[Name], padding: frozenset[str], table: StreamTable) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a stream must appear once in a step, the segments name one twice")
    for request_id in {name[0] for name in names} - padding:
        if request_id not in table.rows:
            raise ValueError(f"request {request_id!r} must be ingested before its first step")


def _row(
    name: Name,
    padding: frozenset[str],
    sink: frozenset[Name],
    table: StreamTable,
    opened: list[Stream],
) -> int:
    if name[0] in padding:
        return NULL_ROW
    row = table.rows[name[0]].get(name[1])
    if row is not None:
        return row
    return NULL_ROW if name in sink else _opened(*name, table, opened).row


def _without_sinks(names: Sequence[Name], sink: frozenset[Name], readers: IntArray) -> IntArray:
    if not sink:
        return readers
    return np.where([name in sink for name in names], NULL_ROW, readers)


def _fork_pairs(
    step: KVStep,
    forks: Sequence[tuple[str, str]],
    ctx: StepContext,
    table: StreamTable,
    opened: list[Stream],
) -> list[ForkPair]:
    pairs: list[ForkPair] = []
    for request_id in _forking_ids(step, ctx) if forks else ():
        for source, target in forks:
            if (request_id, source) in step.sink or (request_id, target) in step.sink:
                continue
            origin = table.get(request_id, source) or _opened(request_id, source, table, opened)
            copy = table.get(request_id, target) or _opened(request_id, target, table, opened)
            pairs.append((origin, copy))
    return pairs


def _opened(request_id: str, label: str, table: StreamTable, opened: list[Stream]) -> Stream:
    opened.append(table.open(request_id, label))
    return opened[-1]
