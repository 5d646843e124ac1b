"""Attention over ring caches, for any batch of sessions at different clocks.

`flex` is FlexAttention, compiled: it visits the listed blocks and touches no other, so slots that
are hidden or were never written may hold anything. `gather` copies the visible frames of each row
and runs plain attention over them: the same result without a compiler, and on a CPU the faster one.
Uncompiled FlexAttention ignores block lists and is never used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mstar_plugin.ring.cache import LayerRingCache
from mstar_plugin.ring.plan import RingTable

RingPath = Literal["flex", "gather"]

MAX_COMPILED_SHAPES = 64


@cache
def can_compile(device_type: str) -> bool:
    """Whether this machine can compile FlexAttention for a kind of device: on a CPU that takes AVX2
    and a C++ compiler.
    """
    if device_type != "cpu":
        return device_type == "cuda"
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_vectors and shutil.which(os.environ.get("CXX", "g++")) is not None


def ring_attention(
    q: Tensor,
    cache: LayerRingCache,
    table: RingTable,
    *,
    path: RingPath | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of each row's frame over its session, as planned in `table`.

    q: `[B, Q, T, D]` of the cache's dtype, after `cache.upsert` of the same pass. `path=None` takes
    `flex` on a GPU and `gather` on a CPU. Returns `[B, Q, T, D]`. RuntimeError for `flex` where
    nothing can compile it.
    """
    if path is None:
        path = "gather" if q.device.type == "cpu" else "flex"
    if path == "gather":
        return gathered_attention(q, cache, table, scale)
    if not can_compile(q.device.type):
        raise RuntimeError(
            f"path flex needs a GPU, or AVX2 and a C++ compiler, got a {q.device.type} device "
            "without: pass path='gather'"
        )
    return flex_ring_attention(q, cache, ring_block_mask(cache, table), scale)


def ring_block_mask(cache: LayerRingCache, table: RingTable) -> BlockMask:
    """Block lists of a table: whole blocks only. Serves every layer of the table's geometry.

    Built with device operations of fixed shape, so it can be part of a captured graph.
    """
    per_frame = cache.tokens_per_frame // cache.block_tokens
    offsets = torch.arange(per_frame, device=table.places.device)
    blocks = (table.places[:, :, None] * per_frame + offsets).flatten(1).to(torch.int32)
    indices = F.pad(blocks, (0, cache.num_places * per_frame - blocks.shape[1]))
    indices = indices[:, None, None].repeat(1, 1, per_frame, 1)
    counts = (table.counts * per_frame).to(torch.int32)[:, None, None].repeat(1, 1, per_frame)
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(indices),
        counts,
        indices,
        BLOCK_SIZE=(cache.block_tokens, cache.block_tokens),
        seq_lengths=(cache.tokens_per_frame, cache.kv.shape[3]),
        compute_q_blocks=False,
    )


def flex_ring_attention(
    q: Tensor, cache: LayerRingCache, block_mask: BlockMask, scale: float | None = None
) -> Tensor:
    """Compiled FlexAttention of `q` `[B, Q, T, D]` over the cache; `[B, Q, T, D]`."""
    shares_heads = q.shape[1] != cache.keys.shape[1]
    inputs = (q, cache.keys, cache.values)
    if torch.compiler.is_compiling():
        return flex_attention(*inputs, block_mask=block_mask, scale=scale, enable_gqa=shares_heads)
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_SHAPES):
        return _compiled()(*inputs, block_mask=block_mask, scale=scale, enable_gqa=shares_heads)


def gathered_attention(
    q: Tensor, cache: LayerRingCache, table: RingTable, scale: float | None = None
) -> Tensor:
    """Attention of each row over a copy of its visible frames; `[B, Q, T, D]`.

    Reads the table on the host.
    """
    k_frames, v_frames = cache.frames
    rows = []
    for row, count in enumerate(table.counts.tolist()):
        places = table.places[row, :count]
        k, v = (x.index_select(1, places).flatten(1, 2)[None] for x in (k_frames, v_frames))
        shares_heads = q.shape[1] != k.shape[1]
        rows.append(
            F.scaled_dot_product_attention(
                q[row : row + 1], k, v, scale=scale, enable_gqa=shares_heads
            )
        )
    return torch.cat(rows)


@cache
def _compiled() -> Callable[..., Tensor]:
    """With `fullgraph` too many shapes raise; a fall back to eager would give wrong results."""
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
