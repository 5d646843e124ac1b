"""Rows of rings on device are those that the transform on the host gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from device_batches import DEVICE, MAX_LEN, RUNS_KERNELS, batch_on
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from mstar_vllm.device_rings import DeviceRing
from mstar_vllm.device_rows import Pages
from mstar_vllm.device_visibility import BatchShape, DeviceVisibility
from mstar_vllm.ring_visibility import RingView, compact_frames, split_frames

pytestmark = [pytest.mark.vllm, *RUNS_KERNELS]
MAX_REQUESTS = 6
EXAMPLES = settings(max_examples=40 if RUNS_KERNELS else 15, deadline=None)
Row = tuple[int, int, list[int]]


@st.composite
def rings(draw: st.DrawFn) -> tuple[RingView, int]:
    """A geometry and the tokens of a kernel's block."""
    block = draw(st.sampled_from([4, 8]))
    view = RingView(
        dilation=draw(st.integers(1, 5)),
        buckets=draw(st.integers(1, 5)),
        frame_tokens=block * draw(st.sampled_from([1, 2, 3, 8])),
    )
    return view, block


@st.composite
def lengths(draw: st.DrawFn, max_query: int) -> tuple[list[int], list[int]]:
    pair = st.tuples(st.integers(1, max_query), st.integers(0, MAX_LEN - max_query))
    pairs = draw(st.lists(pair, min_size=1, max_size=MAX_REQUESTS - 2))
    return [query for query, _ in pairs], [query + before for query, before in pairs]


def visibility(
    view: RingView, block: int, drafts: int = 0, plans_on_host: bool = False
) -> DeviceVisibility:
    shape = BatchShape(
        pages=Pages(page_tokens=view.frame_tokens, block_tokens=block),
        max_requests=MAX_REQUESTS,
        max_model_len=MAX_LEN,
        drafts=drafts,
        plans_on_host=plans_on_host,
    )
    return DeviceVisibility(shape, DeviceRing(view), DEVICE)


def rows_of(seen: CommonAttentionMetadata, block: int) -> list[Row]:
    """Each row that holds tokens: query length, visible tokens, table."""
    starts = seen.query_start_loc.tolist()
    found = []
    for row in range(seen.num_reqs):
        query, length = starts[row + 1] - starts[row], int(seen.seq_lens[row])
        if query:
            table = seen.block_table_tensor[row, : -(-length // block)].tolist()
            found.append((query, length, table))
    return found


def expected_rows(
    query_lens: list[int], seq_lens: list[int], view: RingView, block: int
) -> list[Row]:
    split = split_frames(np.array(query_lens), np.array(seq_lens), view)
    tables = 1000 * np.arange(len(seq_lens))[:, None] + np.arange(-(-MAX_LEN // block))
    seen = compact_frames(tables.astype(np.int32), split, view, block)
    return [
        (int(query), int(length), seen[row, : -(-int(length) // block)].tolist())
        for row, (query, length) in enumerate(zip(split.query_lens, split.seq_lens, strict=True))
    ]


def assert_same_rows(
    seen: CommonAttentionMetadata,
    given_batch: CommonAttentionMetadata,
    lens: tuple[list[int], list[int]],
    ring: tuple[RingView, int],
) -> None:
    view, block = ring
    if seen is given_batch:
        assert max(lens[1]) <= view.reach()
    else:
        assert rows_of(seen, block) == expected_rows(*lens, view, block)
        assert seen.max_seq_len >= int(seen.seq_lens.max())
        is_empty = seen.query_start_loc[1:] == seen.query_start_loc[:-1]
        assert not seen.seq_lens[is_empty[: seen.num_reqs]].any()


@given(ring=rings(), batch=lengths(1), padding=st.integers(0, 2))
@EXAMPLES
def test_decode_rows_are_the_hosts(
    ring: tuple[RingView, int], batch: tuple[list[int], list[int]], padding: int
) -> None:
    given_batch = batch_on(DEVICE, *batch, ring[1], padding=padding)
    seen = visibility(*ring, plans_on_host=True).visible(given_batch)
    assert_same_rows(seen, given_batch, batch, ring)
    assert seen.seq_lens_cpu_upper_bound is not None
    assert seen.seq_lens_cpu_upper_bound.tolist() == seen.seq_lens.tolist()


@given(ring=rings(), batch=lengths(90), plans_on_host=st.booleans())
@EXAMPLES
def test_chunks_are_cut_as_on_the_host(
    ring: tuple[RingView, int], batch: tuple[list[int], list[int]], plans_on_host: bool
) -> None:
    given_batch = batch_on(DEVICE, *batch, ring[1])
    seen = visibility(*ring, plans_on_host=plans_on_host).visible(given_batch)
    assert_same_rows(seen, given_batch, batch, ring)
    assert seen.query_start_loc_cpu.tolist() == seen.query_start_loc[: seen.num_reqs + 1].tolist()


@given(
    data=st.data(),
    ring=rings(),
    drafts=st.integers(1, 9),
    chunks=st.booleans(),
    plans_on_host=st.booleans(),
)
@EXAMPLES
def test_drafts_are_cut_where_the_device_says(
    data: st.DataObject,
    ring: tuple[RingView, int],
    drafts: int,
    chunks: bool,
    plans_on_host: bool,
) -> None:
    query_lens, seq_lens = data.draw(lengths(90 if chunks else 1 + drafts))
    upper = [length + data.draw(st.integers(0, drafts)) for length in seq_lens]
    given_batch = batch_on(DEVICE, query_lens, seq_lens, ring[1], upper=upper, padding=1)
    given_batch.max_query_len = max(2, max(query_lens))
    seen = visibility(*ring, drafts, plans_on_host).visible(given_batch)
    assert_same_rows(seen, given_batch, (query_lens, seq_lens), ring)


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_a_graph_reads_never_moves(drafts: int) -> None:
    ring = visibility(RingView(dilation=4, buckets=2, frame_tokens=16), 16, drafts)
    addresses = set()
    for length in (5, 16, 33, 390):
        seen = ring.visible(batch_on(DEVICE, [1 + drafts] * 4, [length] * 4, 16, padding=2))
        ring.visible(batch_on(DEVICE, [60], [360], 16))
        tensors = (seen.block_table_tensor, seen.seq_lens)
        addresses.add((seen.num_reqs, *(part.data_ptr() for part in tensors)))
    assert len(addresses) == 1


def test_possible_rows_are_enough_for_every_alignment() -> None:
    ring = DeviceRing(RingView(dilation=1, buckets=2, frame_tokens=16))
    assert ring.possible(np.array([17, 1]), np.array([1000, 1000])).tolist() == [0, 0, 1]


def test_padding_sees_nothing() -> None:
    ring = DeviceRing(RingView(dilation=1, buckets=2, frame_tokens=4))
    assert ring.visible(np.array([20, 0, 3], dtype=np.int32)).tolist() == [8, 0, 3]
    batch = batch_on(DEVICE, [1], [20], 4, padding=1)
    seen = visibility(RingView(dilation=1, buckets=2, frame_tokens=4), 4).visible(batch)
    assert seen.seq_lens.dtype == torch.int32
    assert seen.seq_lens.tolist() == [8, 0]
