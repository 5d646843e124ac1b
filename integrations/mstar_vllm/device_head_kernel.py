"""Triton kernels for protected pages: turn the queries, attend, merge with the rest of the row.

Letters: `T` tokens, `V` rows, `H` table columns, `N` parts that the pages are split into.
"""

# Kernels are typed by their docstrings: Triton reads their annotations.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["log_sums_stride", "num_parts", "part_len", "num_tokens"])
def add_protected(
    queries,
    token_stride,
    head_stride,
    keys,
    values,
    block_stride,
    slot_stride,
    kv_head_stride,
    tables,
    table_stride,
    head_lens,
    turns,
    query_start,
    revolutions,
    output,
    out_token_stride,
    out_head_stride,
    log_sums,
    log_sums_stride,
    parts,
    part_sums,
    num_parts,
    part_len,
    num_tokens,
    scale,
    soft_cap,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """One program a row, KV head, tile of `QUERIES` query heads and part of the protected pages;
    rows that turn by 0 are left out. Several parts (`HAS_PARTS`) are for `join_parts` to merge.

    queries, output: `[T, heads, HEAD_SIZE]`; keys, values: `[blocks, BLOCK_TOKENS, KV heads,
    HEAD_SIZE]`; tables: `[V, H]`, head_lens and turns: `[V]`, query_start: `[V + 1]`, int32.
    revolutions: `[PAIRS]` float64, turns of each rotary pair per token. log_sums: `[heads, T]`
    float32, of what `output` holds. parts: `[N, T, heads, HEAD_SIZE]`, part_sums: `[N, T, heads]`,
    float32; part_len: tokens of a part; num_tokens: `T`.
    """
    row = tl.program_id(0)
    turn = tl.load(turns + row)
    end = tl.load(query_start + row + 1)
    tile, part = tl.program_id(2) // num_parts, tl.program_id(2) % num_parts
    first = tl.load(query_start + row) + tile * (QUERIES // GROUP)
    if (turn == 0) | (first >= end):
        return
    lane = tl.arange(0, QUERIES)
    token = (first + lane // GROUP).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    head = kv_head * GROUP + lane % GROUP
    is_query = (lane // GROUP < QUERIES // GROUP) & (token < end)
    dim = tl.arange(0, DIMS)
    is_held = is_query[:, None] & (dim < HEAD_SIZE)[None, :]
    source = queries + (token * token_stride + head * head_stride)[:, None]
    query = _turned_back(
        source, dim, is_held, turn, revolutions, PAIRS=PAIRS, INTERLEAVED=INTERLEAVED
    )
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attended = tl.zeros((QUERIES, DIMS), tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    head_len = tl.load(head_lens + row)
    begin_part = part * part_len
    if HAS_PARTS:
        head_len = tl.minimum(head_len, begin_part + part_len)
    for begin in range(begin_part, head_len, KEYS):
        slot = begin + tl.arange(0, KEYS)
        is_key = slot < head_len
        block = tl.load(table + slot // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        place = block * block_stride + slot % BLOCK_TOKENS * slot_stride + kv_head * kv_head_stride
        is_stored = is_key[:, None] & (dim < HEAD_SIZE)[None, :]
        key = tl.load(keys + place[:, None] + dim[None, :], mask=is_stored, other=0.0)
        value = tl.load(values + place[:, None] + dim[None, :], mask=is_stored, other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        if HAS_CAP:
            score = soft_cap * (2 * tl.sigmoid(2 * score / soft_cap) - 1)
        score = tl.where(is_key[None, :], score, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - raised[:, None])
        shrink = tl.exp(highest - raised)
        total = total * shrink + tl.sum(weight, 1)
        attended = tl.dot(weight.to(value.dtype), value, attended * shrink[:, None])
        highest = raised
    # A part without keys has a sum of minus infinity.
    total = tl.maximum(total, 1e-30)
    own_sum = highest + tl.log(total)
    own = attended / total[:, None]
    if HAS_PARTS:
        place = (part * num_tokens + token) * (GROUP * tl.num_programs(1)) + head
        tl.store(part_sums + place, own_sum, mask=is_query)
        tl.store(parts + place[:, None] * HEAD_SIZE + dim[None, :], own, mask=is_held)
    else:
        rest_sum = tl.load(log_sums + head * log_sums_stride + token, mask=is_query, other=0.0)
        target = token * out_token_stride + head * out_head_stride
        target = output + target[:, None] + dim[None, :]
        rest = tl.load(target, mask=is_held, other=0.0)
        share = tl.sigmoid(own_sum - rest_sum)[:, None]
        merged = own * share + rest.to(tl.float32) * (1 - share)
        tl.store(target, merged.to(rest.dtype), mask=is_held)


@triton.jit(do_not_specialize=["log_sums_stride", "num_tokens"])
def join_parts(
    parts,
    part_sums,
    num_tokens,
    turns,
    query_start,
    output,
    out_token_stride,
    out_head_stride,
    log_sums,
    log_sums_stride,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program a row, head and query, which adds its parts to the rest of the row.

    `PARTS` is a power of two; shapes as in `add_protected`.
    """
    row = tl.program_id(0)
    token = (tl.load(query_start + row) + tl.program_id(2)).to(tl.int64)
    if (tl.load(turns + row) == 0) | (token >= tl.load(query_start + row + 1)):
        return
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, DIMS)
    is_held = dim < HEAD_SIZE
    target = output + token * out_token_stride + head * out_head_stride + dim
    rest = tl.load(target, mask=is_held, other=0.0)
    part = tl.arange(0, PARTS)
    place = (part * num_tokens + token) * tl.num_programs(1) + head
    sums = tl.load(part_sums + place)
    rest_sum = tl.load(log_sums + head * log_sums_stride + token)
    largest = tl.maximum(tl.max(sums, 0), rest_sum)
    shares = tl.exp(sums - largest)
    rest_share = tl.exp(rest_sum - largest)
    seen = (shares > 0)[:, None] & is_held[None, :]
    found = tl.load(parts + place[:, None] * HEAD_SIZE + dim[None, :], mask=seen, other=0.0)
    merged = tl.sum(found * shares[:, None], 0) + rest.to(tl.float32) * rest_share
    merged /= tl.sum(shares, 0) + rest_share
    tl.store(target, merged.to(rest.dtype), mask=is_held)


@triton.jit
def _turned_back(
    source, dim, is_held, turn, revolutions, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Queries `[QUERIES, DIMS]` whose heads begin at `source`, as if `turn` tokens earlier."""
    query = tl.load(source + dim[None, :], mask=is_held, other=0.0)
    if PAIRS:
        if INTERLEAVED:
            pair, partner, is_first = dim // 2, dim ^ 1, dim % 2 == 0
        else:
            is_first = dim < PAIRS
            pair, partner = dim % PAIRS, tl.where(is_first, dim + PAIRS, dim - PAIRS)
        is_paired = dim < 2 * PAIRS
        turned = turn.to(tl.float64) * tl.load(revolutions + pair, mask=is_paired, other=0.0)
        angle = (turned - tl.floor(turned)).to(tl.float32) * 6.283185307179586
        sin = tl.where(is_first, tl.sin(angle), -tl.sin(angle))
        other = tl.load(source + partner[None, :], mask=is_held & is_paired[None, :], other=0.0)
        kept = query.to(tl.float32) * tl.cos(angle)[None, :]
        query = (kept + other.to(tl.float32) * sin[None, :]).to(query.dtype)
    return query
