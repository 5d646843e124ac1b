"""Each token of a ring layer's batch sees the frames of the rule, however the batch was cut."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import Batch, batch_of

from mstar_plugin.ring.geometry import visible_frames
from mstar_vllm.ring_visibility import (
    RingView,
    compact_frames,
    ring_transform,
    seen_frames,
    split_frames,
)

pytestmark = pytest.mark.vllm

GEOMETRIES = st.tuples(st.integers(1, 5), st.integers(1, 5))


def seen_by_tokens(batch: Batch, block: int) -> list[list[int]]:
    """Per token: `1000 * request * block + position` of every key its row shows it."""
    seen = []
    starts = batch.query_start_loc.tolist()
    for row in range(batch.num_reqs):
        num_tokens = starts[row + 1] - starts[row]
        length = int(batch.seq_lens[row])
        for token in range(num_tokens):
            slots = range(length - num_tokens + token + 1)
            blocks = batch.block_table_tensor[row].tolist()
            seen.append([blocks[slot // block] * block + slot % block for slot in slots])
    return seen


def expected(
    query_lens: list[int], seq_lens: list[int], view: RingView, block: int
) -> list[list[int]]:
    seen = []
    size = view.frame_tokens
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(length - query, length):
            frame = position // size
            frames = visible_frames(frame, view.dilation, view.buckets)
            positions = [f * size + slot for f in frames for slot in range(size)]
            positions += range(frame * size, position + 1)
            seen.append([1000 * request * block + p for p in positions])
    return seen


@given(
    geometry=GEOMETRIES,
    ratio=st.sampled_from([1, 2, 4]),
    block=st.sampled_from([2, 4]),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_each_token_sees_what_the_rule_says(
    geometry: tuple[int, int], ratio: int, block: int, requests: list[tuple[int, int]]
) -> None:
    view = RingView(dilation=geometry[0], buckets=geometry[1], frame_tokens=block * ratio)
    query_lens = [query for query, _ in requests]
    seq_lens = [query + stored for query, stored in requests]
    visible = ring_transform(batch_of(query_lens, seq_lens, block), view, block)  # type: ignore[arg-type]
    assert seen_by_tokens(visible, block) == expected(query_lens, seq_lens, view, block)  # type: ignore[arg-type]


@given(
    stored=st.integers(0, 200),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    geometry=GEOMETRIES,
)
@settings(max_examples=100, deadline=None)
def test_chunking_does_not_change_what_a_token_sees(
    stored: int, cuts: list[int], geometry: tuple[int, int]
) -> None:
    view = RingView(dilation=geometry[0], buckets=geometry[1], frame_tokens=4)
    whole = batch_of([sum(cuts)], [stored + sum(cuts)], 4)
    together = seen_by_tokens(ring_transform(whole, view, 4), 4)  # type: ignore[arg-type]
    apart: list[list[int]] = []
    for cut in cuts:
        stored += cut
        apart += seen_by_tokens(ring_transform(batch_of([cut], [stored], 4), view, 4), 4)  # type: ignore[arg-type]
    assert apart == together


@given(frame=st.integers(0, 500), geometry=GEOMETRIES)
def test_the_seen_frames_of_arrays_are_those_of_the_integers(
    frame: int, geometry: tuple[int, int]
) -> None:
    view = RingView(dilation=geometry[0], buckets=geometry[1], frame_tokens=16)
    first, count = seen_frames(np.array([frame]), view)
    seen = visible_frames(frame, *geometry)
    assert int(count[0]) == len(seen)
    assert not seen or int(first[0]) == seen[0]


def test_the_worked_split_has_two_rows() -> None:
    view = RingView(dilation=2, buckets=1, frame_tokens=4)
    rows = split_frames(np.array([6]), np.array([15]), view)
    assert rows.frame.tolist() == [2, 3]
    assert rows.query_lens.tolist() == [3, 3]
    assert rows.seq_lens.tolist() == [4, 7]
    tables = compact_frames(np.arange(10, 14, dtype=np.int32)[None], rows, view, 4)
    assert tables.tolist() == [[12, 12], [12, 13]]


@pytest.mark.parametrize(("dilation", "buckets", "reach"), [(1, 4, 64), (3, 4, 32), (1, 1, 16)])
def test_a_batch_that_sees_everything_comes_back_as_the_same_object(
    dilation: int, buckets: int, reach: int
) -> None:
    view = RingView(dilation=dilation, buckets=buckets, frame_tokens=16)
    batch = batch_of([1, 3], [reach, 5], 16)
    assert ring_transform(batch, view, 16) is batch  # type: ignore[arg-type]
    longer = batch_of([1, 3], [reach + 1, 5], 16)
    assert ring_transform(longer, view, 16).seq_lens.tolist() != [reach + 1, 5]  # type: ignore[arg-type]


def test_padding_rows_stay_empty() -> None:
    view = RingView(dilation=1, buckets=2, frame_tokens=4)
    visible = ring_transform(batch_of([1, 0], [20, 0], 4), view, 4)  # type: ignore[arg-type]
    assert visible.seq_lens.tolist() == [8, 0]
    assert visible.query_start_loc.tolist() == [0, 1, 1]
