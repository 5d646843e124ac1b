"""What the backend's variants share: the name, the specs of their layers, the limits of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import rows, session
from mstar_vllm.cache_specs import RetentionSpec, converted
from mstar_vllm.plugin import BACKEND_NAME
from mstar_vllm.positions import ROLLING, positions_of
from mstar_vllm.visibility import RowLimits, limits_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class RetentionBackend:
    """What the backend says of itself whatever kernels it runs on; mixed in before the parent."""

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)  # type: ignore[misc]
        active = session.current()
        if active is None or active.plan.obstacle is not None:
            return spec
        return converted(spec, active.plan.retention, active.in_flight_tokens)


class BatchLimits:
    """The limits of each batch of one KV cache group; None as long as no request is bounded."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._page_tokens = spec.page_tokens if isinstance(spec, RetentionSpec) else 0
        self._server: RetentionPolicy | None = None
        self._server_limits: RowLimits | None = None
        if isinstance(spec, RetentionSpec) and spec.policy is not None:
            self._server = spec.policy
            self._server_limits = RowLimits.of_policy(spec.policy, spec.page_tokens)

    def current(self, num_rows: int) -> RowLimits | None:
        """Limits of the batch being built, which has `num_rows` rows, padding included."""
        own = rows.published()
        if own is None or not self._page_tokens:
            return self._server_limits
        return self._per_row(own, num_rows)

    def _per_row(self, own: rows.RowPolicies, num_rows: int) -> RowLimits:
        known: dict[RetentionPolicy | None, tuple[int, int, bool]] = {}
        policies = [policy or self._server for policy in own]
        policies += [self._server] * (num_rows - len(policies))
        for policy in set(policies):
            rolls = positions_of(policy) == ROLLING
            known[policy] = (*limits_of(policy, self._page_tokens), rolls)
        columns = np.array([known[policy] for policy in policies[:num_rows]], dtype=np.int64)
        return RowLimits(
            dense=columns[:, 0],
            head_pages=columns[:, 1],
            page_tokens=self._page_tokens,
            rolling=columns[:, 2].astype(bool),
        )
