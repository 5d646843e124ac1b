"""What a planned ring step hands to the model: rows, clocks, and the frames each row attends to.

Letters: `B` rows, `R` ring frames of a layer, `b` its buckets. A *place* is a frame's index in a
layer's storage over all sessions: `session * (R + 1) + slot`, the scratch frame at slot `R`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mstar_plugin.kv.config import RingKVLayerConfig


class RingTable(NamedTuple):
    """Places that each row attends to, in layers of one geometry.

    places: int64 `[B, b + 1]`, ascending; entries from `counts[row]` on repeat the scratch frame.
    counts: int64 `[B]`, at least 1.
    """

    places: Tensor
    counts: Tensor


class RingPlan(NamedTuple):
    """One planned frame of a batch.

    session_idx, frame_pos: int64 `[B]`. tables: one per layer, shared by layers of one geometry.
    The tensors are buffers that the next plan of as many rows fills with its own content, at the
    same addresses, so that a captured graph can replay; keep none of them beyond the step.
    """

    request_ids: tuple[str, ...]
    session_idx: Tensor
    frame_pos: Tensor
    tables: tuple[RingTable, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRow:
    """One row as integers: visible ring slots by layer geometry, the scratch frame not counted."""

    session: int
    frame: int
    slots: Mapping[RingKVLayerConfig, Sequence[int]]


class RowBuffers:
    """The device tensors of plans with a fixed number of rows."""

    def __init__(
        self, num_rows: int, layers: Sequence[RingKVLayerConfig], device: torch.device
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._session_idx = zeros(num_rows)
        self._frame_pos = zeros(num_rows)
        self._by_geometry = {
            g: RingTable(zeros(num_rows, g.ring_buckets + 1), zeros(num_rows))
            for g in dict.fromkeys(layers)
        }
        self._tables = tuple(self._by_geometry[layer] for layer in layers)

    def fill(self, request_ids: Iterable[str], rows: Sequence[RingRow]) -> RingPlan:
        """Write `rows` into the buffers."""
        _fill(self._session_idx, [row.session for row in rows])
        _fill(self._frame_pos, [row.frame for row in rows])
        for geometry, table in self._by_geometry.items():
            places = [_places(row, geometry) for row in rows]
            _fill(table.counts, [len(p) for p in places])
            _fill(table.places, [_padded(p, geometry.ring_buckets + 1) for p in places])
        return RingPlan(tuple(request_ids), self._session_idx, self._frame_pos, self._tables)


def _places(row: RingRow, geometry: RingKVLayerConfig) -> list[int]:
    first = row.session * (geometry.ring_frames + 1)
    return [first + slot for slot in (*row.slots[geometry], geometry.ring_frames)]


def _padded(places: Sequence[int], width: int) -> list[int]:
    return [*places, *[places[-1]] * (width - len(places))]


def _fill(buffer: Tensor, values: Sequence[int] | Sequence[list[int]]) -> None:
    buffer.copy_(torch.tensor(values, dtype=torch.int64).view(buffer.shape))
