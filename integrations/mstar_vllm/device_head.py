"""Attention over protected pages at a distance that stays, on CUDA.

Turning a query back by the released tokens is turning the protected keys forward by them. The
parent's kernels attend to a row's other pages; one kernel of our own turns the row's queries,
attends to its protected pages and merges both by their log-sum-exps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm.device_head_kernel import add_protected, join_parts
from mstar_vllm.device_rows import HeadRows

if TYPE_CHECKING:
    from mstar_plugin.model_kv import Rotary

MOST_QUERIES_AT_ONCE = 64
MOST_KEYS_AT_ONCE = 128
LEAST_TILE = 16
# Tokens of a part: a multiple of the keys at once.
LEAST_PART = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What a row's own kernel attended to: output `[T, heads, head size]` and log-sum-exps
    `[heads, T]`, float32, natural logarithm.
    """

    output: torch.Tensor
    log_sums: torch.Tensor


class ProtectedAttention:
    """Attends to the protected pages of one layer; `rotary` is None for a layer without positions,
    whose queries are the same at every distance. processors: of the device, which few rows with
    many protected pages should fill.
    """

    def __init__(
        self,
        rotary: Rotary | None,
        device: torch.device,
        scale: float,
        soft_cap: float,
        processors: int,
    ) -> None:
        self._pairs = 0 if rotary is None else rotary.rotary_dim // 2
        self._interleaved = rotary is not None and rotary.interleaved
        self._scale, self._soft_cap = scale, soft_cap
        self._most_programs = 2 * processors
        revolutions = torch.zeros(1, dtype=torch.float64)
        if rotary is not None:
            revolutions = torch.from_numpy(inverse_frequencies(rotary) / (2 * math.pi))
        self._revolutions = revolutions.to(device)

    def add(
        self,
        attended: Attended,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_start: torch.Tensor,
        head: HeadRows,
        most_queries: int,
    ) -> None:
        """Add what the rows of `head` see of their protected pages to `attended.output`, in place.

        queries: `[T, heads, head size]`; keys, values: `[blocks, block tokens, KV heads, head
        size]` with the same strides, the last one 1; query_start: `[V + 1]` int32. A row that turns
        holds at most `most_queries` tokens.
        """
        num_tokens, num_heads, head_size = queries.shape
        _, block_tokens, num_kv_heads, _ = keys.shape
        num_rows, group = head.turns.shape[0], num_heads // num_kv_heads
        most_keys = head.tables.shape[1] * block_tokens
        at_once = queries_at_once(most_queries, group)
        tiles = triton.cdiv(most_queries, at_once // group)
        room = self._most_programs // (num_rows * num_kv_heads * tiles)
        if num_tokens > num_rows * most_queries:
            # Long rows beside these, for whose tokens the parts would be made too.
            room = 1
        part_len, num_parts = split(most_keys, room)
        parts, part_sums = self._parts(num_parts, queries)
        dims = max(LEAST_TILE, power_of_two(head_size))
        output, log_sums = attended.output, attended.log_sums
        add_protected[(num_rows, num_kv_heads, tiles * num_parts)](
            queries,
            queries.stride(0),
            queries.stride(1),
            keys,
            values,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            head.tables,
            head.tables.stride(0),
            head.seq_lens,
            head.turns,
            query_start,
            self._revolutions,
            output,
            output.stride(0),
            output.stride(1),
            log_sums,
            log_sums.stride(0),
            parts,
            part_sums,
            num_parts,
            part_len,
            num_tokens,
            self._scale,
            self._soft_cap,
            BLOCK_TOKENS=block_tokens,
            GROUP=group,
            HEAD_SIZE=head_size,
            DIMS=dims,
            PAIRS=self._pairs,
            INTERLEAVED=self._interleaved,
            HAS_CAP=self._soft_cap > 0,
            QUERIES=at_once,
            KEYS=keys_at_once(most_keys, at_once),
            HAS_PARTS=num_parts > 1,
        )
        if num_parts == 1:
            return
        join_parts[(num_rows, num_heads, most_queries)](
            parts,
            part_sums,
            num_tokens,
            head.turns,
            query_start,
            output,
            output.stride(0),
            output.stride(1),
            log_sums,
            log_sums.stride(0),
            HEAD_SIZE=head_size,
            DIMS=dims,
            PARTS=num_parts,
        )

    def warm_up(
        self, cache: torch.Tensor, num_heads: int, head_blocks: int, page_tokens: int
    ) -> None:
        """Compile all that `add` will launch, before a request waits for it.

        cache: `[blocks, block tokens, KV heads, 2 x head size]`, keys and values side by side;
        head_blocks: columns of the tables of protected pages; page_tokens: the most queries of a
        row that turns.
        """
        head_size = cache.shape[3] // 2
        queries = cache.new_zeros(1, num_heads, head_size)
        log_sums = cache.new_zeros(num_heads, 1, dtype=torch.float32)
        for most_queries in (*doubled_until(page_tokens), page_tokens):
            for rows in doubled_until(self._most_programs + 1):
                empty = cache.new_zeros(rows + 1, dtype=torch.int32)
                tables = cache.new_zeros(rows, head_blocks, dtype=torch.int32)
                self.add(
                    Attended(output=torch.zeros_like(queries), log_sums=log_sums),
                    queries,
                    cache[..., :head_size],
                    cache[..., head_size:],
                    empty,
                    HeadRows(tables=tables, seq_lens=empty[:rows], turns=empty[:rows]),
                    most_queries,
                )

    def _parts(self, count: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the parts `[N, T, heads, head size]` and their log-sum-exps `[N, T, heads]`."""
        if count == 1:
            return queries, queries
        room = torch.empty(count, *queries.shape, dtype=torch.float32, device=queries.device)
        return room, torch.empty_like(room[..., 0], memory_format=torch.contiguous_format)


def split(most_keys: int, room: int) -> tuple[int, int]:
    """Tokens of a part, and parts: a power of two, at most `room`, none shorter than `LEAST_PART`.

    Example: 8,192 keys with room for 33 -> parts of 256, 32; with room for 5 -> of 2,048, 4.
    """
    most = max(1, min(room, triton.cdiv(most_keys, LEAST_PART)))
    num_parts = 1 << (most.bit_length() - 1)
    part_len = triton.cdiv(triton.cdiv(most_keys, num_parts), LEAST_PART) * LEAST_PART
    return part_len, num_parts


def queries_at_once(most_queries: int, group: int) -> int:
    """Query heads of a program, a power of two that holds a whole group.

    Example: one query in groups of 4 -> 16; 100 queries in groups of 7 -> 64.
    """
    wanted = min(MOST_QUERIES_AT_ONCE, power_of_two(most_queries * group))
    return max(LEAST_TILE, wanted, power_of_two(group))


def keys_at_once(most_keys: int, queries: int) -> int:
    """Keys a program loads at once: many for few queries, which wait for memory.

    Example: 48 keys -> 64; 8,192 keys for 16 queries -> 128, for 64 -> 64.
    """
    most = MOST_KEYS_AT_ONCE if queries == LEAST_TILE else MOST_KEYS_AT_ONCE // 2
    return max(LEAST_TILE, min(most, power_of_two(most_keys)))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def doubled_until(end: int) -> list[int]:
    """Example: 16 -> [1, 2, 4, 8]."""
    return [1 << power for power in range((end - 1).bit_length())]
