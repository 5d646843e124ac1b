"""Turned copies of pages equal pages into which the operation wrote turned keys."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from rotation import turned
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from mstar_plugin.model_kv import Rotary
from mstar_vllm.copy_ledger import Copies
from mstar_vllm.cpu_key_turn import KeyTurn

pytestmark = pytest.mark.vllm

BLOCKS, HEADS = 6, 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Pool:
    """A KV cache of a few blocks, written by vLLM's operation."""

    def __init__(self, dtype: torch.dtype, block_size: int, head_size: int) -> None:
        self.isa = _get_attn_isa(dtype, block_size, head_size, "auto")
        self.block_size = block_size
        self.kv_cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * head_size, dtype=dtype)

    def write(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: `[block size, heads, head size]`."""
        halves = self.kv_cache.view(BLOCKS, HEADS, 2 * self.block_size, -1).chunk(2, dim=2)
        slots = block * self.block_size + torch.arange(self.block_size)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, self.isa)


def turned_by(tokens: int, keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    dim = rotary.rotary_dim
    angles = tokens * rotary.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return turned(keys, rotary, angles).to(keys.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (32, 80), (48, 96), (128, 256)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_turned_copy_is_the_page_of_turned_keys(
    dtype: torch.dtype, block_size: int, head_size: int, interleaved: bool
) -> None:
    rotary = Rotary(theta=1e4, rotary_dim=head_size // 2, interleaved=interleaved)
    pool = Pool(dtype, block_size, head_size)
    generator = torch.Generator().manual_seed(block_size + head_size)
    pages = torch.randn(4, block_size, HEADS, head_size, generator=generator).to(dtype)
    pool.write(1, pages[0], pages[1])
    pool.write(4, pages[2], pages[3])
    turn = KeyTurn(rotary)
    # What one step's copies leave behind must not show in the next's.
    turn.copy(pool.kv_cache, Copies(*map(np.array, ([1, 4], [2, 3], [48, 16]))), pool.isa)
    turn.copy(pool.kv_cache, Copies(*map(np.array, ([1, 4], [2, 3], [160, 1024]))), pool.isa)

    expected = Pool(dtype, block_size, head_size)
    for block, keys, values in ((1, pages[0], pages[1]), (4, pages[2], pages[3])):
        expected.write(block, keys, values)
    expected.write(2, turned_by(160, pages[0], rotary), pages[1])
    expected.write(3, turned_by(1024, pages[2], rotary), pages[3])
    torch.testing.assert_close(
        pool.kv_cache, expected.kv_cache, rtol=0, atol=TOLERANCE[dtype], equal_nan=True
    )


def test_a_layer_without_positions_has_plain_copies() -> None:
    pool = Pool(torch.float32, 16, 64)
    pool.write(1, torch.randn(16, HEADS, 64), torch.randn(16, HEADS, 64))
    KeyTurn(None).copy(pool.kv_cache, Copies(*map(np.array, ([1], [5], [32]))), pool.isa)
    assert torch.equal(pool.kv_cache[5], pool.kv_cache[1])
    assert not torch.equal(pool.kv_cache[1], torch.zeros_like(pool.kv_cache[1]))
