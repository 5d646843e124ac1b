"""Turned copies of cached pages on CPU.

The CPU kernels keep the keys of a block in an order of their own, which depends on the processor.
The order is found out by writing numbered keys through vLLM's own operation.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_plugin.rotary import inverse_frequencies

if TYPE_CHECKING:
    from mstar_plugin.model_kv import Rotary
    from mstar_vllm.copy_ledger import Copies

# Whole numbers below this are exact in every dtype that keys are stored in.
_DIGIT = 128


class KeyTurn:
    """Copies blocks of one layer with their keys turned; `rotary` is None for a layer without
    positions, whose copies are plain.
    """

    def __init__(self, rotary: Rotary | None) -> None:
        self._rotary = rotary
        if rotary is not None:
            self._frequencies = torch.from_numpy(inverse_frequencies(rotary))

    def copy(self, kv_cache: torch.Tensor, copies: Copies, isa: str) -> None:
        """kv_cache: `[blocks, KV heads, block size, 2 * head size]`, keys before values."""
        if not len(copies.sources):
            return
        blocks, heads, block_size, both = kv_cache.shape
        sources, targets = torch.from_numpy(copies.sources), torch.from_numpy(copies.targets)
        flat = kv_cache.view(blocks, heads, block_size * both)
        read = flat[sources]
        if self._rotary is not None:
            size = block_size * both // 2
            order, places = key_order(isa, kv_cache.dtype, block_size, both // 2)
            keys = read[..., :size][..., places].view(-1, heads, block_size, both // 2)
            angles = torch.from_numpy(copies.turns).double()[:, None] * self._frequencies
            turned = turned_keys(keys, angles, self._rotary)
            read[..., :size] = turned.view(-1, heads, size)[..., order]
        flat[targets] = read


def turned_keys(keys: torch.Tensor, angles: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """keys: `[C, heads, tokens, head size]`; angles: `[C, rotary_dim / 2]` radians."""
    cos, sin = angles.cos().float()[:, None, None], angles.sin().float()[:, None, None]
    dim = rotary.rotary_dim
    wide = keys.float()
    if rotary.interleaved:
        first, second = wide[..., 0:dim:2], wide[..., 1:dim:2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        turned = pairs.flatten(-2)
    else:
        first, second = wide[..., : dim // 2], wide[..., dim // 2 : dim]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, wide[..., dim:]], dim=-1).to(keys.dtype)


@cache
def key_order(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How a block stores the keys of one head: `order[place]` is the number of the element stored
    there (token * head size + element), `places` the reverse; both `[block size * head size]`.
    """
    number = np.arange(block_size * head_size)
    low = _stored(number % _DIGIT, isa, dtype, block_size, head_size)
    middle = _stored(number // _DIGIT % _DIGIT, isa, dtype, block_size, head_size)
    high = _stored(number // _DIGIT**2, isa, dtype, block_size, head_size)
    order = low + _DIGIT * middle + _DIGIT**2 * high
    if not np.array_equal(np.sort(order), number):
        raise RuntimeError(
            f"the CPU kernels ({isa}) must store each element of a key once; rolling positions "
            "cannot be served here, use 'positions': 'absolute'"
        )
    return torch.from_numpy(order), torch.from_numpy(np.argsort(order))


def _stored(
    values: np.ndarray, isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> np.ndarray:
    """`values` as the operation stores them when they are the keys of one block of one head."""
    from vllm import _custom_ops as ops

    keys = torch.from_numpy(values).to(dtype).view(block_size, 1, head_size)
    kv_cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
    key_cache, value_cache = kv_cache.chunk(2, dim=2)
    slots = torch.arange(block_size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, torch.zeros_like(keys), key_cache, value_cache, slots, isa)
    stored: np.ndarray = key_cache.reshape(-1).double().numpy().astype(np.int64)
    return stored
