"""What the backend's variants share: the name, the specs of their layers, the limits of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import rows, session
from mstar_vllm.cache_specs import RetentionSpec, converted
from mstar_vllm.plugin import BACKEND_NAME
from mstar_vllm.visibility import RowLimits

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class RetentionBackend:
    """What the backend says of itself whatever kernels it runs on; mixed in before the parent."""

    keeps_copies = False
    """Whether rolling positions are served from turned copies of the protected pages."""

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)  # type: ignore[misc]
        active = session.current()
        if active is None or active.plan.obstacle is not None:
            return spec
        return converted(
            spec, active.plan.retention, active.in_flight_tokens, keeps_copies=cls.keeps_copies
        )


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
        policies = [policy or self._server for policy in own]
        policies += [self._server] * (num_rows - len(policies))
        return RowLimits.of_policies(policies[:num_rows], self._page_tokens)
