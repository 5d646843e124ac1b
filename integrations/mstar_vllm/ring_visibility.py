"""The batch transform of ring layers: vLLM's batch, cut into rows of one frame each.

A query of frame `f` sees its own frame up to itself and the frames that a ring still holds for `f`
(`mstar_plugin.ring.geometry.visible_frames`). Each row, the tokens of one frame in a chunk, gets
the table of those frames' pages and a length to match; kernels are bottom-right causal, so that is
exact. Letters in shapes: `R` requests, `V` rows after the split, `W` table columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mstar_vllm.ring_specs import RingSpec
from mstar_vllm.visibility import IntArray, Rows, with_rows

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RingView:
    """What decides the visible frames: `d` and `b` of the geometry, and the tokens of a frame."""

    dilation: int
    buckets: int
    frame_tokens: int

    @classmethod
    def of_spec(cls, spec: RingSpec) -> RingView:
        return cls(
            dilation=spec.pinned_dilation, buckets=spec.ring_buckets, frame_tokens=spec.frame_tokens
        )

    def reach(self) -> int:
        """The longest sequence that sees everything: of the first lap, or, where frames between
        the kept ones are lost, of two frames.
        """
        return (self.buckets if self.dilation == 1 else 2) * self.frame_tokens


@dataclass(frozen=True, slots=True)
class FrameRows(Rows):
    """Rows of one frame each, all `[V]` int64.

    frame: the frame of the row's tokens. first_seen, num_seen: the first earlier frame the row
    sees, and how many, each `d` after the one before.
    """

    frame: IntArray
    first_seen: IntArray
    num_seen: IntArray


def ring_view(spec: KVCacheSpec) -> RingView | None:
    """The view of a ring group's batches, None for a group of another kind."""
    return RingView.of_spec(spec) if isinstance(spec, RingSpec) else None


def split_frames(query_lens: IntArray, seq_lens: IntArray, view: RingView) -> FrameRows:
    """Cut each request's tokens at the boundaries of frames.

    query_lens, seq_lens: `[R]` tokens of this step, and stored tokens including them.
    Example: frames of 4 tokens, d=2, b=1, one request of 6 new tokens ending at 15: frame 2
    (positions 9 to 11) is kept and sees no other, frame 3 (12 to 14) sees frame 2; two rows of 3
    tokens with lengths 4 and 7.
    """
    size = view.frame_tokens
    first = seq_lens - query_lens
    first_frame = first // size
    counts = np.maximum(first_frame, (seq_lens - 1) // size) - first_frame + 1
    request = np.repeat(np.arange(len(seq_lens)), counts)
    offset = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    frame = first_frame[request] + offset
    start = np.maximum(first[request], frame * size)
    end = np.minimum(seq_lens[request], (frame + 1) * size)
    first_seen, num_seen = seen_frames(frame, view)
    return FrameRows(
        request=request,
        frame=frame,
        first_seen=first_seen,
        num_seen=num_seen,
        query_lens=end - start,
        seq_lens=num_seen * size + end - frame * size,
    )


def seen_frames(frame: IntArray, view: RingView) -> tuple[IntArray, IntArray]:
    """First earlier frame that each of `frame` sees, and how many: `visible_frames` for arrays.

    Example: d=8, b=4 -> frame 31 sees 4 from 0 on, 32 sees 3 from 8 on.
    """
    kept = -(-frame // view.dilation)
    resident = view.buckets - (frame % view.dilation == 0)
    first = np.maximum(0, kept - resident)
    return first * view.dilation, kept - first


def compact_frames(
    tables: npt.NDArray[np.int32], rows: FrameRows, view: RingView, block_tokens: int
) -> npt.NDArray[np.int32]:
    """Tables of the rows with the columns of visible frames only, `[V, W']` int32.

    tables: `[R, W]` in kernel blocks of `block_tokens` tokens, which divide the frame.
    """
    per_frame = view.frame_tokens // block_tokens
    columns = np.arange(max(1, -(-int(rows.seq_lens.max()) // block_tokens)))
    place = columns // per_frame
    frame = np.where(
        place < rows.num_seen[:, None],
        rows.first_seen[:, None] + place * view.dilation,
        rows.frame[:, None],
    )
    source = np.minimum(frame * per_frame + columns % per_frame, tables.shape[1] - 1)
    visible: npt.NDArray[np.int32] = tables[rows.request[:, None], source]
    return visible


def ring_transform(
    batch: CommonAttentionMetadata, view: RingView, block_tokens: int
) -> CommonAttentionMetadata:
    """The batch as its rows see it; the same object where every token sees all before it.

    For batches in host memory.
    """
    if batch.max_seq_len <= view.reach():
        return batch
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    query_lens = np.diff(batch.query_start_loc.numpy()).astype(np.int64)
    rows = split_frames(query_lens, seq_lens, view)
    tables = compact_frames(batch.block_table_tensor.numpy(), rows, view, block_tokens)
    return with_rows(batch, rows, tables)
