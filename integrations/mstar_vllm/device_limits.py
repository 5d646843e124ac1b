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
from mstar_vllm.visibility import RowLimits, limits_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

MOST_TOKENS = 2**31 - 1
# More steps than an engine keeps in flight, so that no copy is waited for.
STAGED_STEPS = 4


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The same limits twice.

    host: for planning. dense, head_pages: int32 on device: one entry for all requests, or, where
    `per_row`, one a request, or, where slots is given, one a runner slot; slots: `[requests]` int64
    on device.
    """

    host: RowLimits
    dense: torch.Tensor
    head_pages: torch.Tensor
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
        dense, head_pages = self._copied(host)
        return DeviceLimits(host=host, dense=dense, head_pages=head_pages, per_row=True)

    def _shared(self, policy: RetentionPolicy | None) -> DeviceLimits | None:
        if policy is None:
            return None
        host = RowLimits.of_policy(policy, self._page_tokens)
        pair = torch.tensor(
            [[min(int(host.dense), MOST_TOKENS)], [int(host.head_pages)]],
            dtype=torch.int32,
            device=self._device,
        )
        return DeviceLimits(host=host, dense=pair[0], head_pages=pair[1])

    def _by_slot(self, batch: rows_v2.BatchPolicies, num_requests: int) -> DeviceLimits:
        if self._slots is None or self._slots.policies is not batch.policies:
            self._slots = SlotLimits(batch.policies, self.server, self._page_tokens, self._device)
        limits = self._slots
        limits.refresh()
        slots = np.zeros(num_requests, dtype=np.int64)
        np.maximum(batch.slots_on_host, 0, out=slots[: len(batch.slots_on_host)])
        host = RowLimits(
            dense=limits.on_host[0, slots],
            head_pages=limits.on_host[1, slots],
            page_tokens=self._page_tokens,
        )
        dense, head_pages = limits.on_device
        return DeviceLimits(host=host, dense=dense, head_pages=head_pages, slots=batch.slots)

    def _copied(self, host: RowLimits) -> torch.Tensor:
        if self._ring is None or self._rows is None:
            self._ring = PinnedIndexRing(2 * self._max_requests, STAGED_STEPS, per_plan=1)
            self._rows = torch.zeros(2, self._max_requests, dtype=torch.int32, device=self._device)
        self._ring.begin_plan()
        pair = np.stack([np.minimum(host.dense, MOST_TOKENS), host.head_pages])
        count = pair.shape[1]
        staged = self._ring.take(pair.reshape(-1).astype(np.int32)).view(2, count)
        return self._rows[:, :count].copy_(staged, non_blocking=True)


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
        self._ring = PinnedIndexRing(2 * policies.num_slots, STAGED_STEPS, per_plan=1)
        self.on_host: npt.NDArray[np.int64] = np.zeros((2, policies.num_slots), dtype=np.int64)
        self.on_device = torch.zeros(2, policies.num_slots, dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Bring both copies up to date; free where no request came or went."""
        if self._version == self.policies.version:
            return
        self._version = self.policies.version
        known: dict[Any, tuple[int, int]] = {}
        for slot, own in enumerate(self.policies.by_slot):
            policy = own or self._server
            if policy not in known:
                known[policy] = limits_of(policy, self._page_tokens)
            self.on_host[:, slot] = known[policy]
        self._ring.begin_plan()
        staged = self._ring.take(np.minimum(self.on_host, MOST_TOKENS).reshape(-1))
        self.on_device.copy_(staged.view(2, -1), non_blocking=True)
