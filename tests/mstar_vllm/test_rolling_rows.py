"""Rows with rolling positions: what each token sees, over any course of steps, in any blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import Batch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import copy_page, first_release, protected_pages, released_pages
from mstar_vllm.copy_ledger import BlockWrites, Copies, CopyLedger
from mstar_vllm.positions import RollingPolicy, policy_with
from mstar_vllm.rolling_rows import RollingRows, Wave, written_blocks
from mstar_vllm.visibility import RowLimits, limits_of, transform

Key = tuple[int, int, int]
"""Request, position and the tokens that the key was turned by."""


@dataclass(frozen=True)
class StepBatch(Batch):
    slot_mapping: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    num_actual_tokens: int = 0


@dataclass
class Stream:
    """A request: its policy, its blocks by page, and how many tokens are settled."""

    number: int
    policy: RetentionPolicy
    blocks: list[int] = field(default_factory=list)
    stored: int = 0


class Machine:
    """Streams over one pool of blocks of one page each; `memory` says which key is where."""

    def __init__(self, page: int, num_blocks: int) -> None:
        self.page = page
        self.free = list(range(1, num_blocks))
        self.memory: dict[tuple[int, int], Key] = {}
        self.writes = BlockWrites()
        self.rows = RollingRows(page, self.writes, drafts=4)
        self.streams: list[Stream] = []

    def add(self, policy: RetentionPolicy) -> None:
        number = max((stream.number for stream in self.streams), default=0) + 1
        self.streams.append(Stream(number, policy))

    def grow(self, stream: Stream, tokens: int) -> None:
        policy, last = stream.policy, stream.stored + tokens - 1
        needed = last // self.page + 1
        releases = released_pages(last, policy.context_budget, policy.protected_prefix, self.page)
        if releases and isinstance(policy, RollingPolicy):
            place = copy_page(last, policy.context_budget, policy.protected_prefix, self.page)
            needed = max(needed, place + protected_pages(policy.protected_prefix, self.page))
        while len(stream.blocks) < needed:
            stream.blocks.append(self.free.pop(0))

    def release(self, stream: Stream) -> None:
        policy = stream.policy
        first = protected_pages(policy.protected_prefix, self.page)
        released = released_pages(
            stream.stored, policy.context_budget, policy.protected_prefix, self.page
        )
        for column in range(first, first + released):
            if stream.blocks[column] >= 0:
                self.free.append(stream.blocks[column])
                stream.blocks[column] = -1

    def drop(self, stream: Stream) -> None:
        self.free += [block for block in stream.blocks if block >= 0]
        stream.blocks, stream.stored = [], 0

    def step(self, scheduled: list[tuple[Stream, int]]) -> None:
        """Write the scheduled tokens, run the waves, check what each token sees."""
        for stream, tokens in scheduled:
            self.grow(stream, tokens)
        batch = self.batch(scheduled)
        limits = self.limits(scheduled)
        for stream, tokens in scheduled:
            for position in range(stream.stored, stream.stored + tokens):
                place = (stream.blocks[position // self.page], position % self.page)
                self.memory[place] = (stream.number, position, 0)
        waves = self.waves(batch, limits)
        shareable = {block for stream, _ in scheduled for block in self.shareable(stream)}
        assert not shareable & {int(target) for wave in waves for target in wave.copies.targets}
        seen = self.attend(waves) if waves else self.seen(transform(batch, limits, self.page))  # type: ignore[arg-type]
        assert [sorted(keys) for keys in seen] == [
            sorted(keys) for keys in self.expected(scheduled)
        ]

    def waves(self, batch: StepBatch, limits: RowLimits) -> list[Wave]:
        self.writes.note(written_blocks(batch, self.page))  # type: ignore[arg-type]
        return self.rows.waves(batch, limits)  # type: ignore[arg-type]

    def lend(self, count: int) -> None:
        """Another group of layers fills some blocks of the pool and gives them back."""
        blocks = self.free[-count:]
        self.memory.update(
            {(b, offset): (-1, -1, 0) for b in blocks for offset in range(self.page)}
        )
        self.writes.note(np.array(sorted(blocks)))

    def shareable(self, stream: Stream) -> list[int]:
        """Blocks that end before the first release: other requests may read them."""
        policy = stream.policy
        tokens = first_release(policy.context_budget, policy.protected_prefix, self.page)
        return [block for block in stream.blocks[: tokens // self.page] if block >= 0]

    def batch(self, scheduled: list[tuple[Stream, int]]) -> StepBatch:
        query = [tokens for _, tokens in scheduled]
        ends = [stream.stored + tokens for stream, tokens in scheduled]
        width = max(len(stream.blocks) for stream, _ in scheduled)
        table = torch.zeros(len(scheduled), width, dtype=torch.int32)
        slots = []
        for row, (stream, tokens) in enumerate(scheduled):
            # The engine's rows keep the numbers of blocks that were given back.
            table[row, : len(stream.blocks)] = torch.tensor([max(b, 0) for b in stream.blocks])
            slots += [
                stream.blocks[position // self.page] * self.page + position % self.page
                for position in range(stream.stored, stream.stored + tokens)
            ]
        starts = torch.tensor(np.concatenate([[0], np.cumsum(query)]), dtype=torch.int32)
        lens = torch.tensor(ends, dtype=torch.int32)
        return StepBatch(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(scheduled),
            max_query_len=max(query),
            max_seq_len=max(ends),
            block_table_tensor=table,
            is_prefilling=torch.tensor([q > 1 for q in query]),
            slot_mapping=torch.tensor([*slots, -1, -1], dtype=torch.int64),
            num_actual_tokens=len(slots),
        )

    def limits(self, scheduled: list[tuple[Stream, int]]) -> RowLimits:
        policies = [stream.policy for stream, _ in scheduled]
        pairs = np.array([limits_of(policy, self.page) for policy in policies], dtype=np.int64)
        return RowLimits(
            dense=pairs[:, 0],
            head_pages=pairs[:, 1],
            page_tokens=self.page,
            rolling=np.array([isinstance(policy, RollingPolicy) for policy in policies]),
        )

    def attend(self, waves: list[Wave]) -> list[list[Key]]:
        seen: dict[int, list[Key]] = {}
        for wave in waves:
            for source, target, turn in zip(
                wave.copies.sources, wave.copies.targets, wave.copies.turns, strict=True
            ):
                for offset in range(self.page):
                    request, position, _ = self.memory[int(source), offset]
                    self.memory[int(target), offset] = (request, position, int(turn))
            found = self.seen(wave.batch)
            places = range(len(found)) if wave.tokens is None else wave.tokens.tolist()
            seen.update(zip(places, found, strict=True))
        return [seen[token] for token in range(len(seen))]

    def seen(self, batch: Any) -> list[list[Key]]:
        keys = []
        starts = batch.query_start_loc.tolist()
        for row in range(batch.num_reqs):
            tokens = starts[row + 1] - starts[row]
            for token in range(tokens):
                length = int(batch.seq_lens[row]) - tokens + token + 1
                blocks = batch.block_table_tensor[row].tolist()
                keys.append(
                    [
                        self.memory[blocks[slot // self.page], slot % self.page]
                        for slot in range(length)
                    ]
                )
        return keys

    def expected(self, scheduled: list[tuple[Stream, int]]) -> list[list[Key]]:
        keys = []
        for stream, tokens in scheduled:
            policy = stream.policy
            head = protected_pages(policy.protected_prefix, self.page) * self.page
            for position in range(stream.stored, stream.stored + tokens):
                gone = self.page * released_pages(
                    position, policy.context_budget, policy.protected_prefix, self.page
                )
                turn = gone if isinstance(policy, RollingPolicy) else 0
                near = range(head + gone, position + 1) if gone else range(position + 1)
                kept = range(head if gone else 0)
                keys.append(
                    [(stream.number, j, turn) for j in kept] + [(stream.number, j, 0) for j in near]
                )
        return keys


POLICIES = st.builds(
    policy_with, st.integers(1, 20), st.integers(0, 14), st.sampled_from(["rolling", "absolute"])
)


@given(data=st.data(), page=st.sampled_from([2, 4, 8]))
@settings(max_examples=120, deadline=None)
def test_each_token_sees_the_head_at_a_distance_that_stays(data: st.DataObject, page: int) -> None:
    machine = Machine(page, 400)
    for _ in range(data.draw(st.integers(1, 3))):
        machine.add(data.draw(POLICIES))
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = [s for s in machine.streams if s.stored < 150 and data.draw(st.booleans())]
        scheduled = [(s, data.draw(st.sampled_from([1, 1, 1, 2, 5, 30]))) for s in chosen]
        if not scheduled:
            continue
        machine.step(scheduled)
        for stream, tokens in scheduled:
            # Rejected drafts are written again by the next step; preempted requests start anew.
            stream.stored += data.draw(st.integers(1, tokens)) if tokens <= 5 else tokens
            machine.release(stream)
            if data.draw(st.integers(0, 9)) == 0:
                machine.drop(stream)
                machine.lend(data.draw(st.integers(1, 20)))


def test_a_chunk_keeps_copies_in_pages_that_no_later_row_sees() -> None:
    machine = Machine(8, 400)
    machine.add(RollingPolicy(24, 7))
    (stream,) = machine.streams
    counts = []
    for tokens in (200, 200, 5):
        machine.grow(stream, tokens)
        scheduled = [(stream, tokens)]
        waves = machine.waves(machine.batch(scheduled), machine.limits(scheduled))
        counts.append((len(waves), sum(len(wave.copies.sources) for wave in waves)))
        stream.stored += tokens
        machine.release(stream)
    # 21 and 26 rows that read copies; the last one's are in place for the next step.
    assert counts == [(7, 21), (5, 26), (1, 0)]


def test_drafts_that_are_taken_back_have_overwritten_nothing() -> None:
    machine = Machine(2, 100)
    machine.add(RollingPolicy(6, 2))
    (stream,) = machine.streams
    for tokens, settled in [(30, 30), *[(5, 1)] * 9]:
        machine.step([(stream, tokens)])
        stream.stored += settled
        machine.release(stream)


def test_a_block_that_another_group_filled_holds_no_copy() -> None:
    """A request in the blocks of one before that had the same prompt, and shares its cached head;
    in between, the blocks were a sliding window's.
    """
    machine = Machine(8, 12)
    policy = RollingPolicy(24, 7)
    first = Stream(1, policy)
    again = Stream(1, policy)
    for stream in (first, again):
        machine.streams = [stream]
        for tokens in (39 - stream.stored, 1, 1):
            machine.step([(stream, tokens)])
            stream.stored += tokens
            machine.release(stream)
        again.blocks, again.stored = first.blocks[:1], 8
        machine.free = sorted(set(range(1, 12)) - set(again.blocks))
        machine.lend(len(machine.free))


def decode(machine: Machine, stream: Stream, steps: int) -> list[int]:
    """Copies made by each of `steps` decode steps."""
    made = []
    for _ in range(steps):
        machine.grow(stream, 1)
        waves = machine.waves(machine.batch([(stream, 1)]), machine.limits([(stream, 1)]))
        made.append(sum(len(wave.copies.sources) for wave in waves))
        stream.stored += 1
        machine.release(stream)
    return made


def test_a_copy_is_made_once_for_each_released_page() -> None:
    machine = Machine(8, 100)
    machine.add(RollingPolicy(24, 7))
    (stream,) = machine.streams
    made = decode(machine, stream, 63)
    assert [position for position, copies in enumerate(made) if copies] == [39, 47, 55]
    assert sum(made) == 3


def test_a_copy_is_made_again_once_its_block_or_its_source_was_written() -> None:
    writes = BlockWrites()
    ledger = CopyLedger(writes)
    copies = Copies(np.array([3]), np.array([9]), np.array([16]))
    assert len(ledger.take_missing(copies).sources) == 1
    assert len(ledger.take_missing(copies).sources) == 0
    for block in (9, 3):
        writes.note(np.array([block]))
        assert len(ledger.take_missing(copies).sources) == 1


def test_a_copy_that_another_group_makes_in_a_block_is_a_write_to_it() -> None:
    writes = BlockWrites()
    one, other = CopyLedger(writes), CopyLedger(writes)
    copies = Copies(np.array([3]), np.array([9]), np.array([16]))
    for ledger in (one, other, one):
        assert len(ledger.take_missing(copies).sources) == 1


@pytest.mark.parametrize(("stored", "place"), [(39, 6), (46, 6), (47, 7)])
def test_the_place_of_the_copies(stored: int, place: int) -> None:
    assert copy_page(stored, 24, 7, 8) == place


@given(
    budget=st.integers(1, 90),
    prefix=st.integers(1, 70),
    page=st.integers(1, 32),
    n=st.integers(0, 900),
)
def test_copies_lie_behind_every_page_that_queries_of_their_release_fill(
    budget: int, prefix: int, page: int, n: int
) -> None:
    released = released_pages(n, budget, prefix, page)
    last = n
    while released_pages(last + 1, budget, prefix, page) == released:
        last += 1
    if released:
        assert last // page == copy_page(n, budget, prefix, page) - 1
