"""What a forward does with its plan: writing the step's K and V, reading what its streams hold."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar_plugin.kv.cache import KVCache
from mstar_plugin.kv.flight import Flight
from mstar_plugin.kv.planner import read_rows


class ForwardCursor:
    """The step whose forward runs, the layer it is in, and the plan label used when none is named.

    With `reserve_tokens` the write rows of each graph slot and label live in a buffer that keeps
    its address, filled up with rows of the sink page: a captured graph writes its padded tail
    there.
    """

    def __init__(self, cache: KVCache) -> None:
        self.layer = 0
        self.label: str | None = None
        self._cache = cache
        self._flight: Flight | None = None
        self._reserved = 0
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._writes: dict[str, Tensor] = {}
        self._reads: dict[str, Tensor] = {}

    def reserve_tokens(self, num_tokens: int) -> None:
        """Hold at least `num_tokens` write rows per slot and label; the largest call counts."""
        if num_tokens > self._reserved:
            self._reserved = num_tokens
            self._buffers.clear()

    def begin(self, flight: Flight) -> None:
        """Make a planned step the one that is written and read."""
        self._flight = flight
        self._reads = {}
        self._writes = {
            label: self._placed(flight.slot, label, rows) for label, rows in flight.writes.items()
        }
        self.label = next(iter(flight.writes), None)

    def end(self, flight: Flight) -> None:
        if self._flight is flight:
            self._flight, self._writes, self._reads = None, {}, {}

    def write(self, k: Tensor, v: Tensor | None, layer: int | None, label: str | None) -> None:
        rows = self._writes[self._planned(label)]
        num_tokens = max(k.shape[0], self._num_tokens(label))
        self._cache.write(self.layer if layer is None else layer, rows[:num_tokens], k, v)

    def read(self, layer: int | None, label: str | None) -> tuple[Tensor, Tensor | None]:
        name = self._planned(label)
        if name not in self._reads:
            assert self._flight is not None and self._flight.outputs is not None
            indptrs = self._flight.outputs[name].cpu_indptrs
            rows = read_rows(indptrs, self._cache.page_size)
            self._reads[name] = rows.to(self._cache.data.device)
        return self._cache.read(self.layer if layer is None else layer, self._reads[name])

    def _num_tokens(self, label: str | None) -> int:
        assert self._flight is not None
        return self._flight.writes[self._planned(label)].numel()

    def _planned(self, label: str | None) -> str:
        name = self.label if label is None else label
        if self._flight is None or name is None:
            raise RuntimeError(
                "K and V can be accessed between plan and commit, no step is planned"
            )
        if name not in self._writes:
            raise KeyError(f"the step has plan labels {sorted(self._writes)}, not {name!r}")
        return name

    def _placed(self, slot: int, label: str, rows: Tensor) -> Tensor:
        rows = rows.to(self._cache.data.device)
        if rows.numel() > self._reserved:
            return rows
        buffer = self._buffers.get((slot, label))
        if buffer is None:
            buffer = torch.zeros(self._reserved, dtype=torch.int64, device=rows.device)
            self._buffers[slot, label] = buffer
        buffer[: rows.numel()] = rows
        buffer[rows.numel() :] = 0
        return buffer
