"""The batch transform as one Triton kernel: lengths, row boundaries and page tables on device.

Letters as in `visibility.py`: `R` requests, `V` rows after the split, `W` table columns.
"""

# Kernels are typed by their docstrings: Triton reads their annotations.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from mstar_vllm.kernel_launch import OneForm

COLUMNS_AT_ONCE = 256


@OneForm
def compact_rows(
    tables,
    tables_stride,
    seq_lens,
    query_start,
    limits,
    limits_stride,
    slots,
    plan,
    plan_stride,
    out_tables,
    out_stride,
    out_numbers,
    numbers_stride,
    out_head_tables,
    out_head_stride,
    num_rows,
    num_slots,
    last_column,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PER_ROW: tl.constexpr,
    BY_SLOT: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a row: its length, its first token and its table without the released pages.

    tables: `[R, W]`; seq_lens: `[R]`; query_start: `[R + 1]`; all int32. limits: `[3, N]` int32,
    dense tokens, head pages and turned pages, one entry for all requests, one a request
    (`PER_ROW`), or one a runner slot (`BY_SLOT`), found through slots, `[num_slots]` int64;
    requests behind those are padding. plan: where `SPLIT`, `[2, V]` int32, a row's request and its
    number among that request's rows, of which one past the request's last comes out empty; else a
    row is a request of at most one token. out_numbers: `[4, V + 1]` int32, see `RowBuffers`. Where
    `TURNS`, a row that does not see every page has its turned pages in a table and a length of
    their own, and the tokens to turn its queries back by.
    """
    row = tl.program_id(0)
    request = row
    if SPLIT:
        request = tl.load(plan + row)
    entry = tl.zeros((), tl.int64)
    if PER_ROW:
        entry += request
    if BY_SLOT:
        entry = tl.maximum(0, tl.load(slots + request, mask=request < num_slots, other=0))
    limit = tl.load(limits + entry)
    stored = tl.load(seq_lens + request)
    released = _released(stored - 1, limit, PAGE_TOKENS)
    end = stored
    if SPLIT:
        released, begin, end = _part(
            query_start,
            request,
            stored,
            tl.load(plan + plan_stride + row),
            limit,
            released,
            PAGE_TOKENS,
        )
        out_query_start = out_numbers + numbers_stride
        tl.store(out_query_start + row, begin)
        if row == num_rows - 1:
            tl.store(out_query_start + num_rows, tl.load(query_start + request + 1))
    visible = end - released * PAGE_TOKENS
    head = tl.load(limits + limits_stride + entry)
    gap = released
    source = tables + request.to(tl.int64) * tables_stride
    if TURNS:
        apart = tl.load(limits + 2 * limits_stride + entry)
        apart = tl.where((released > 0) & (visible > 0), apart, 0)
        tl.store(out_numbers + 2 * numbers_stride + row, apart * PAGE_TOKENS)
        turn = tl.where(apart > 0, released * PAGE_TOKENS, 0)
        tl.store(out_numbers + 3 * numbers_stride + row, turn)
        width = apart * (PAGE_TOKENS // BLOCK_TOKENS)
        target = out_head_tables + row.to(tl.int64) * out_head_stride
        _copy_columns(source, target, width, width, 0, last_column, COLUMNS)
        visible -= apart * PAGE_TOKENS
        head = tl.where(apart > 0, 0, head)
        gap += apart
    tl.store(out_numbers + row, visible)
    _copy_columns(
        source,
        out_tables + row.to(tl.int64) * out_stride,
        (visible + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
        head * (PAGE_TOKENS // BLOCK_TOKENS),
        gap * (PAGE_TOKENS // BLOCK_TOKENS),
        last_column,
        COLUMNS,
    )


@triton.jit
def _released(position, limit, PAGE_TOKENS: tl.constexpr):
    """Pages the token at `position` does not see."""
    return tl.maximum(0, (position - limit) // PAGE_TOKENS)


@triton.jit
def _part(query_start, request, stored, offset, limit, last_released, PAGE_TOKENS: tl.constexpr):
    """Row `offset` of a request: released pages, its first token in the batch, stored tokens at its
    end; no tokens at all past the request's last row.
    """
    query_begin = tl.load(query_start + request)
    query_end = tl.load(query_start + request + 1)
    first = stored - (query_end - query_begin)
    before = _released(first, limit, PAGE_TOKENS)
    released = before + offset
    boundary = limit + released * PAGE_TOKENS
    begin = query_begin + tl.where(offset == 0, 0, boundary - first)
    end = tl.where(released >= last_released, stored, boundary + PAGE_TOKENS)
    is_past = released > tl.maximum(before, last_released)
    begin = tl.where(is_past, query_end, begin)
    end = tl.where(is_past, released * PAGE_TOKENS, end)
    return released, begin, end


@triton.jit
def _copy_columns(
    source_row, target_row, width, head_blocks, gap, last_column, COLUMNS: tl.constexpr
):
    """The `width` columns a row sees: the head's, then those behind the gap."""
    for first_column in range(0, width, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        source = tl.where(column < head_blocks, column, column + gap)
        block = tl.load(source_row + tl.minimum(source, last_column), mask=column < width)
        tl.store(target_row + column, block, mask=column < width)
