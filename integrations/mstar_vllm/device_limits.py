"""The limits of a batch's requests, where the kernel and the host's planning read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.host_index import PinnedIndexRing
from mstar_vllm import rows, rows_v2
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_kernels import COLUMNS_AT_ONCE, compact_rows
from mstar_vllm.device_rows import STAGED_STEPS, BatchTensors, Pages, RowBuffers
from mstar_vllm.retention import BatchLimits
from mstar_vllm.visibility import IntArray, RowLimits, Rows, split_rows

MOST_TOKENS = 2**31 - 1
LIMIT_COLUMNS = 3


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of one batch twice: the rule of its rows.

    host: for planning. columns: `[3, N]` int32 on device, dense tokens, head pages and turned
    pages, one entry for all requests, or, where `per_row`, one a request, or, where slots is given,
    one a runner slot. Turned pages are the head pages where a request's positions roll, else 0;
    within the server's, for which tables are made. slots: `[requests]` int64 on device.
    """

    host: RowLimits
    columns: torch.Tensor
    per_row: bool = False
    slots: torch.Tensor | None = None

    def sees_all(self, stored: IntArray) -> bool:
        """Whether nothing is released of requests with so many `stored` tokens."""
        return not np.any(stored > self.host.dense + self.host.page_tokens)

    def split(self, query_lens: IntArray, stored: IntArray) -> Rows:
        return split_rows(query_lens, stored, self.host)

    def possible(self, query_lens: IntArray, stored: IntArray) -> IntArray:
        """The request of each row that a batch can need, `stored` being upper bounds.

        Example: page 16, chunks of 17 and 1 tokens, much released -> [0, 0, 1].
        """
        page = self.host.page_tokens
        crossings = -(-np.maximum(query_lens - 1, 0) // page)
        most = np.maximum(0, (stored - 1 - self.host.dense) // page)
        return np.repeat(np.arange(len(stored)), 1 + np.minimum(crossings, most))

    def visible(self, stored: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Tokens that the last of `stored` tokens sees, itself included; 0 of 0.

        Example: page 8, dense 31: 39 of 39, 33 of 41.
        """
        tokens: npt.NDArray[np.int32] = stored - self._least_seen
        np.remainder(tokens, self.host.page_tokens, out=tokens)
        tokens += self._least_seen
        return np.minimum(tokens, stored, out=tokens)

    def longest(self, most_stored: int, stored: npt.NDArray[np.int32] | None) -> int:
        """Most tokens a row can see; stored: upper bounds, None where only the largest is known."""
        most = self.host.dense + self.host.page_tokens
        if isinstance(most, int):
            return min(most_stored, most)
        return most_stored if stored is None else max(1, int(np.minimum(stored, most).max()))

    @cached_property
    def _least_seen(self) -> Any:
        """Tokens seen by one that has released something: so many and less than a page more."""
        least = np.minimum(self.host.dense + 1, MOST_TOKENS - self.host.page_tokens)
        return least.astype(np.int32)

    def fill(
        self,
        out: RowBuffers,
        batch: BatchTensors,
        pages: Pages,
        num_rows: int,
        plan: torch.Tensor | None,
    ) -> None:
        """Launch the kernel: rows are the batch's requests where `plan` is None."""
        tables, slots, unused = batch.block_table_tensor, self.slots, batch.seq_lens
        compact_rows.launch(
            num_rows,
            tables,
            tables.stride(0),
            batch.seq_lens,
            batch.query_start_loc,
            self.columns,
            self.columns.stride(0),
            unused if slots is None else slots,
            unused if plan is None else plan,
            0 if plan is None else plan.stride(0),
            out.tables,
            out.tables.stride(0),
            out.numbers,
            out.numbers.stride(0),
            out.head.tables,
            out.head.tables.stride(0),
            num_rows,
            0 if slots is None else slots.shape[0],
            tables.shape[1] - 1,
            PAGE_TOKENS=pages.page_tokens,
            BLOCK_TOKENS=pages.block_tokens,
            PER_ROW=self.per_row,
            BY_SLOT=slots is not None,
            SPLIT=plan is not None,
            TURNS=out.head_width > 0,
            COLUMNS=COLUMNS_AT_ONCE,
        )


class DeviceBatchLimits:
    """The limits of each batch of one KV cache group; None as long as no request is bounded."""

    def __init__(self, spec: RetentionSpec, max_requests: int, device: torch.device) -> None:
        self._on_host = BatchLimits(spec)
        self._device = device
        self._max_requests = max_requests
        self._ring: PinnedIndexRing | None = None
        self._slots: SlotLimits | None = None
        self._rows: torch.Tensor | None = None
        self._page_tokens = spec.page_tokens
        self._server = spec.policy
        self.always = self._shared(self._server)

    def current(self, num_requests: int) -> DeviceLimits | None:
        """Limits of the batch being built, which has `num_requests` requests, padding included."""
        by_slot = rows_v2.published()
        if by_slot is not None:
            return self._by_slot(by_slot, num_requests)
        if rows.published() is None:
            return self.always
        host = self._on_host.current(num_requests)
        assert host is not None
        return DeviceLimits(host, self._copied(host), per_row=True)

    def most_visible(self) -> int | None:
        """Most tokens a row can see under the server's policy, or a request's tighter one, whose
        prefix may end a page later; None without one.
        """
        if self.always is None:
            return None
        return self.always.host.reach() + self._page_tokens

    def _shared(self, policy: RetentionPolicy | None) -> DeviceLimits | None:
        if policy is None:
            return None
        host = RowLimits.of_policy(policy, self._page_tokens)
        return DeviceLimits(host, torch.from_numpy(columns_of(host)).to(self._device))

    def _by_slot(self, batch: rows_v2.BatchPolicies, num_requests: int) -> DeviceLimits:
        if self._slots is None or self._slots.policies is not batch.policies:
            self._slots = SlotLimits(batch.policies, self._server, self._page_tokens, self._device)
        limits = self._slots
        limits.refresh()
        slots = np.zeros(num_requests, dtype=np.int64)
        np.maximum(batch.slots_on_host, 0, out=slots[: len(batch.slots_on_host)])
        return DeviceLimits(limits.of_slots(slots), limits.on_device, slots=batch.slots)

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
