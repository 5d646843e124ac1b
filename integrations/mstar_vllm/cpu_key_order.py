"""The order in which vLLM's CPU kernels store the keys of a block.

It depends on the processor and is found out by writing numbered keys through vLLM's own operation.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

# Whole numbers below this are exact in every dtype that keys are stored in.
_DIGIT = 128


class KeyPlace(NamedTuple):
    """What the order depends on: the kernels' instruction set and the shape of one head's block."""

    isa: str
    dtype: torch.dtype
    block_size: int
    head_size: int


@cache
def key_order(place: KeyPlace) -> tuple[torch.Tensor, torch.Tensor]:
    """How a block stores the keys of one head: `order[place]` is the number of the element stored
    there (token * head size + element), `places` the reverse; both `[block size * head size]`.
    """
    number = np.arange(place.block_size * place.head_size)
    low = _stored(number % _DIGIT, place)
    middle = _stored(number // _DIGIT % _DIGIT, place)
    high = _stored(number // _DIGIT**2, place)
    order = low + _DIGIT * middle + _DIGIT**2 * high
    if not np.array_equal(np.sort(order), number):
        raise RuntimeError(
            f"the CPU kernels ({place.isa}) must store each element of a key once; rolling "
            "positions cannot be served here, use 'positions': 'absolute'"
        )
    return torch.from_numpy(order), torch.from_numpy(np.argsort(order))


def _stored(values: np.ndarray, place: KeyPlace) -> np.ndarray:
    """`values` as the operation stores them when they are the keys of one block of one head."""
    from vllm import _custom_ops as ops

    isa, dtype, block_size, head_size = place
    keys = torch.from_numpy(values).to(dtype).view(block_size, 1, head_size)
    kv_cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
    key_cache, value_cache = kv_cache.chunk(2, dim=2)
    slots = torch.arange(block_size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, torch.zeros_like(keys), key_cache, value_cache, slots, isa)
    stored: np.ndarray = key_cache.reshape(-1).double().numpy().astype(np.int64)
    return stored
