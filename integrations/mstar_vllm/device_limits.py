"""The limits of a batch's requests, where the kernel and the host's planning read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.host_index import PinnedIndexRing
from mstar_vllm import rows, rows_v2
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.retention import BatchLimits
from mstar_vllm.visibility import RowLimits

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

MOST_TOKENS = 2**31 - 1
# More steps than an engine keeps in flight, so that no copy is waited for.
STAGED_STEPS = 4
LIMIT_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The same limits twice.

    host: for planning. dense, head_pages, turned_pages: int32 on device, one entry for all
    requests, or, where `per_row`, one a request, or, where slots is given, one a runner slot.
    turned_pages: the head pages where a request's positions roll, else 0; within the server's, for
    which tables are made. slots: `[requests]` int64 on device.
    """

    host: RowLimits
    dense: torch.Tensor
    head_pages: torch.Tensor
    turned_pages: torch.Tensor
    per_row: bool = False
    slots: torch.Tensor | None = None


class DeviceBatchLimits:
    """The limits of each batch of one KV cache group; None as long as no request is bounded."""

    def __init__(self, spec: KVCacheSpec, max_requests: int, device: torch.device) -> None:
        self._on_host = BatchLimits(spec)
        self._device = device
        self._max_requests = max_requests
        self._ring: PinnedIndexRing | None = None
        self._slots: SlotLimits | None = None
        self._rows: torch.Tensor | None = None
        self._page_tokens = spec.page_tokens if isinstance(spec, RetentionSpec) else 0
        self.server = spec.policy if isinstance(spec, RetentionSpec) else None
        self.of_server = self._shared(self.server)

    def current(self, num_requests: int) -> DeviceLimits | None:
        """Limits of the batch being built, which has `num_requests` requests, padding included."""
        if not self._page_tokens:
            return None
        by_slot = rows_v2.published()
        if by_slot is not None:
            return self._by_slot(by_slot, num_requests)
        if rows.published() is None:
            return self.of_server
        host = self._on_host.current(num_requests)
        assert host is not None
        return self._of(host, self._copied(host), per_row=True)

    def _shared(self, policy: RetentionPolicy | None) -> DeviceLimits | None:
        if policy is None:
            return None
        host = RowLimits.of_policy(policy, self._page_tokens)
        return self._of(host, torch.from_numpy(columns_of(host)).to(self._device))

    def _by_slot(self, batch: rows_v2.BatchPolicies, num_requests: int) -> DeviceLimits:
        if self._slots is None or self._slots.policies is not batch.policies:
            self._slots = SlotLimits(batch.policies, self.server, self._page_tokens, self._device)
        limits = self._slots
        limits.refresh()
        slots = np.zeros(num_requests, dtype=np.int64)
        np.maximum(batch.slots_on_host, 0, out=slots[: len(batch.slots_on_host)])
        return self._of(limits.of_slots(slots), limits.on_device, slots=batch.slots)

    @staticmethod
    def _of(host: RowLimits, columns: torch.Tensor, **where: Any) -> DeviceLimits:
        """columns: as of `columns_of`, on device."""
        dense, head, turned = columns.unbind()
        return DeviceLimits(host=host, dense=dense, head_pages=head, turned_pages=turned, **where)

    def _copied(self, host: RowLimits) -> torch.Tensor:
        if self._ring is None or self._rows is None:
            shape = (LIMIT_COLUMNS, self._max_requests)
            self._ring = PinnedIndexRing(shape[0] * shape[1], STAGED_STEPS, per_plan=1)
            self._rows = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._ring.begin_plan()
        columns = columns_of(host)
        staged = self._ring.take(columns.reshape(-1)).view(columns.shape)
        return self._rows[:, : columns.shape[1]].copy_(staged, non_blocking=True)


def columns_of(limits: RowLimits) -> npt.NDArray[np.int32]:
    """What the kernel reads of limits, `[3, R]` int32: dense tokens, head pages, turned pages."""
    turned = np.where(limits.rolling, limits.head_pages, 0)
    columns = [np.minimum(limits.dense, MOST_TOKENS), limits.head_pages, turned]
    table: npt.NDArray[np.int32] = np.stack(np.broadcast_arrays(*columns)).astype(np.int32)
    return table.reshape(LIMIT_COLUMNS, -1)


class SlotLimits:
    """Limits of the runner's request slots, brought up to date when requests come and go."""

    def __init__(
        self,
        policies: rows_v2.SlotPolicies,
        server: RetentionPolicy | None,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self.policies = policies
        self._server = server
        self._page_tokens = page_tokens
        self._version = -1
        count = policies.num_slots
        self._ring = PinnedIndexRing(LIMIT_COLUMNS * count, STAGED_STEPS, per_plan=1)
        self._on_host = RowLimits(np.zeros(count, np.int64), np.zeros(count, np.int64), page_tokens)
        self.on_device = torch.zeros(LIMIT_COLUMNS, count, dtype=torch.int32, device=device)

    def of_slots(self, slots: npt.NDArray[np.int64]) -> RowLimits:
        """Limits of the requests in `slots`."""
        known = self._on_host
        return RowLimits(known.dense[slots], known.head_pages[slots], known.page_tokens)

    def refresh(self) -> None:
        """Bring both copies up to date; free where no request came or went."""
        if self._version == self.policies.version:
            return
        self._version = self.policies.version
        policies = [own or self._server for own in self.policies.by_slot]
        self._on_host = RowLimits.of_policies(policies, self._page_tokens)
        self._ring.begin_plan()
        columns = columns_of(self._on_host)
        staged = self._ring.take(columns.reshape(-1)).view(columns.shape)
        self.on_device.copy_(staged, non_blocking=True)
