"""Turned copies of cached pages on CPU, turned where the kernels store them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm.cpu_key_order import KeyPlace, key_order

if TYPE_CHECKING:
    from mstar_plugin.model_kv import Rotary
    from mstar_vllm.copy_ledger import Copies


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rotary pairs of the keys of one head that a block stores, all `[block size * head size]`.

    pair: number of the pair, that of the last one and one more where nothing turns; partner: where
    the other element of the pair is stored; sign: of its sine.
    """

    pair: torch.Tensor
    partner: torch.Tensor
    sign: torch.Tensor


@dataclass(frozen=True, slots=True)
class Turn:
    """How the stored keys of `copies` turn: `key * cos + key[partner] * sin`.

    cos, sin: `[C, 1, block size * head size]` float32.
    """

    copies: Copies
    place: KeyPlace
    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor


class KeyTurn:
    """Copies blocks with their keys turned; `rotary` is None for layers without positions, whose
    copies are plain. Layers that share one compute the cosines of a step once.
    """

    def __init__(self, rotary: Rotary | None) -> None:
        self._rotary = rotary
        self._last: Turn | None = None
        if rotary is not None:
            self._frequencies = torch.from_numpy(inverse_frequencies(rotary))

    def copy(self, kv_cache: torch.Tensor, copies: Copies, isa: str) -> None:
        """kv_cache: `[blocks, KV heads, block size, 2 * head size]`, keys before values."""
        if not len(copies.sources):
            return
        blocks, heads, block_size, both = kv_cache.shape
        sources, targets = torch.from_numpy(copies.sources), torch.from_numpy(copies.targets)
        flat = kv_cache.view(blocks, heads, block_size * both)
        read = flat.index_select(0, sources)
        if self._rotary is not None:
            place = KeyPlace(isa, kv_cache.dtype, block_size, both // 2)
            turn = self._turn(self._rotary, copies, place)
            stored = read[..., : block_size * both // 2]
            keys = stored.float()
            stored.copy_(keys * turn.cos + keys[..., turn.partner] * turn.sin)
        flat.index_copy_(0, targets, read)

    def _turn(self, rotary: Rotary, copies: Copies, place: KeyPlace) -> Turn:
        last = self._last
        if last is not None and last.copies is copies and last.place == place:
            return last
        pairs = stored_pairs(place, rotary)
        angles = torch.from_numpy(copies.turns).double()[:, None] * self._frequencies
        still = torch.zeros(len(angles), 1, dtype=torch.float64)
        of_element = torch.cat([angles, still], dim=1)[:, None, pairs.pair]
        turn = Turn(
            copies=copies,
            place=place,
            cos=of_element.cos().float(),
            sin=of_element.sin().float() * pairs.sign,
            partner=pairs.partner,
        )
        self._last = turn
        return turn


@cache
def shared_turn(rotary: Rotary | None) -> KeyTurn:
    """The turn of all layers with these rotary settings."""
    return KeyTurn(rotary)


@cache
def stored_pairs(place: KeyPlace, rotary: Rotary) -> Pairs:
    order, places = key_order(place)
    half, dim = rotary.rotary_dim // 2, order % place.head_size
    if rotary.interleaved:
        pair, is_first, other = dim // 2, dim % 2 == 0, dim ^ 1
    else:
        is_first = dim < half
        pair, other = dim % half, torch.where(is_first, dim + half, dim - half)
    turns = dim < rotary.rotary_dim
    return Pairs(
        pair=torch.where(turns, pair, half),
        partner=places[order - dim + torch.where(turns, other, dim)],
        sign=torch.where(is_first, -1.0, 1.0),
    )
