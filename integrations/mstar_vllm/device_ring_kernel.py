"""The batch transform of ring layers as one Triton kernel, see `ring_visibility.py`.

Letters: `R` requests, `V` rows after the split, `W` table columns.
"""

# Kernels are typed by their docstrings: Triton reads their annotations.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton.language as tl

from mstar_vllm.kernel_launch import OneForm


@OneForm
def frame_rows(
    tables,
    tables_stride,
    seq_lens,
    query_start,
    plan,
    plan_stride,
    out_tables,
    out_stride,
    out_numbers,
    numbers_stride,
    num_rows,
    last_column,
    DILATION: tl.constexpr,
    BUCKETS: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a row, of the tokens of one frame: its length, its first token and the table of
    the frames it sees.

    tables: `[R, W]`; seq_lens: `[R]`; query_start: `[R + 1]`; plan: where `SPLIT`, `[2, V]`, a
    row's request and its number among that request's rows, of which one past the request's last
    comes out empty; else a row is a request of at most one token. All int32. out_numbers:
    `[4, V + 1]` int32, see `RowBuffers`.
    """
    row = tl.program_id(0)
    request = row
    if SPLIT:
        request = tl.load(plan + row)
    end = tl.load(seq_lens + request)
    frame = tl.maximum(0, end - 1) // FRAME_TOKENS
    if SPLIT:
        query_begin = tl.load(query_start + request)
        query_end = tl.load(query_start + request + 1)
        first = end - (query_end - query_begin)
        last_frame = frame
        frame = first // FRAME_TOKENS + tl.load(plan + plan_stride + row)
        begin = query_begin + tl.maximum(0, frame * FRAME_TOKENS - first)
        tl.store(out_numbers + numbers_stride + row, tl.minimum(begin, query_end))
        if row == num_rows - 1:
            tl.store(out_numbers + numbers_stride + num_rows, query_end)
        end = tl.where(frame > last_frame, 0, tl.minimum(end, (frame + 1) * FRAME_TOKENS))
    kept = tl.cdiv(frame, DILATION)
    resident = BUCKETS - tl.where(frame % DILATION == 0, 1, 0)
    first_kept = tl.maximum(0, kept - resident)
    num_seen = kept - first_kept
    visible = tl.where(end > 0, (num_seen - frame) * FRAME_TOKENS + end, 0)
    tl.store(out_numbers + row, visible)
    source_row = tables + request.to(tl.int64) * tables_stride
    target_row = out_tables + row.to(tl.int64) * out_stride
    per_frame = FRAME_TOKENS // BLOCK_TOKENS
    width = tl.cdiv(visible, BLOCK_TOKENS)
    for first_column in range(0, width, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        place = column // per_frame
        seen = tl.where(place < num_seen, (first_kept + place) * DILATION, frame)
        source = tl.minimum(seen * per_frame + column % per_frame, last_column)
        block = tl.load(source_row + source, mask=column < width)
        tl.store(target_row + column, block, mask=column < width)
