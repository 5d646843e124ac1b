"""The start-up report: what is served, what a token costs, how many requests fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.positions import positions_of
from mstar_vllm.ring_specs import RingSpec
from mstar_vllm.serving import GENERIC, ServingPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def report_lines(
    plan: ServingPlan, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[str]:
    """The report of one worker's share of the model, a line each."""
    architecture = vllm_config.model_config.architectures[0]
    how = "read from the engine's layers" if plan.adapter == GENERIC else f"adapter {plan.adapter}"
    lines = [f"mstar serves {architecture} ({how})"]
    lines += [_group_line(i, group) for i, group in enumerate(kv_cache_config.kv_cache_groups)]
    lines.append(_pool_line(vllm_config, kv_cache_config))
    lines += _policy_lines(plan, vllm_config, kv_cache_config)
    return lines


def warnings(plan: ServingPlan, vllm_config: VllmConfig, in_flight_tokens: int) -> list[str]:
    """What an operator should change for the policy to pay."""
    policy = plan.retention
    if policy is None:
        return []
    resident = policy.context_budget + policy.protected_prefix
    if resident >= vllm_config.model_config.max_model_len:
        return [
            f"mstar: a policy of {resident} tokens bounds nothing, because max_model_len is "
            f"{vllm_config.model_config.max_model_len}"
        ]
    if in_flight_tokens > resident:
        return [
            f"mstar: {in_flight_tokens} tokens can be in flight per request, more than the "
            f"{resident} of the policy; lower --max-num-batched-tokens to fit more requests"
        ]
    return []


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    spec: Any

    @property
    def bytes_per_token(self) -> int:
        return int(self.layers * self.spec.page_size_bytes // self.spec.block_size)


def _shapes(group: Any) -> Iterator[_Shape]:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        yield _Shape(len(group.layer_names), group.kv_cache_spec)
        return
    for spec in dict.fromkeys(per_layer.values()):
        yield _Shape(sum(other == spec for other in per_layer.values()), spec)


def _group_line(index: int, group: Any) -> str:
    return "; ".join(
        f"mstar group {index}: {shape.layers} layers, {_kind(shape.spec)}, "
        f"{getattr(shape.spec, 'num_kv_heads', '-')} KV heads of "
        f"{getattr(shape.spec, 'head_size', '-')}, page {shape.spec.block_size} tokens, "
        f"{shape.bytes_per_token:,} bytes per token"
        for shape in _shapes(group)
    )


def _kind(spec: Any) -> str:
    if isinstance(spec, RetentionSpec):
        return "full attention"
    if isinstance(spec, RingSpec):
        apart = f" {spec.pinned_dilation} apart" if spec.pinned_dilation > 1 else ""
        return f"ring of {spec.ring_buckets} frames{apart}"
    window = getattr(spec, "sliding_window", None)
    return f"window of {window} tokens" if window else type(spec).__name__


def _pool_line(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    pages = kv_cache_config.num_blocks - 1
    page = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    length = vllm_config.model_config.max_model_len
    fit = _requests_that_fit(vllm_config, kv_cache_config)
    return (
        f"mstar pool: {pages:,} pages, {pages * page:,} token slots; "
        f"{fit:,.1f} requests of {length:,} tokens fit"
    )


def _policy_lines(
    plan: ServingPlan, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[str]:
    if plan.ring is not None:
        return _ring_lines(vllm_config, kv_cache_config)
    policy = plan.retention
    if policy is None:
        why = f", because of {plan.obstacle}" if plan.obstacle else ""
        own = "requests cannot bring a policy" if plan.obstacle else "requests may bring a policy"
        return [f"mstar bounds nothing; {own}{why}"]
    longest = vllm_config.model_config.max_model_len
    caps = {
        min(spec.admission_cap() or 0, -(-longest // spec.block_size))
        for group in kv_cache_config.kv_cache_groups
        for spec in [next(_shapes(group)).spec]
        if isinstance(spec, RetentionSpec)
    }
    without = _requests_that_fit(vllm_config, _without_policy(kv_cache_config))
    return [
        f"mstar bounds requests to {policy.context_budget:,} tokens behind "
        f"{policy.protected_prefix:,} protected, at {positions_shown(plan)} positions: at most "
        f"{', '.join(str(cap) for cap in sorted(caps))} pages per request and group; "
        f"{without:,.1f} requests would fit without the policy"
    ]


def positions_shown(plan: ServingPlan) -> str:
    """The policy's positions, with what rules rolling ones out where nobody chose."""
    positions = positions_of(plan.retention)
    return f"{positions} (because of {plan.not_rolling})" if plan.not_rolling else positions


def _ring_lines(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    pages = sum(spec.pages.num_pages for spec in specs if isinstance(spec, RingSpec))
    lines = [f"mstar keeps rings: a session claims {pages} pages at its start, however long it is"]
    if vllm_config.cache_config.enable_prefix_caching:
        lines.append("mstar: sessions with rings share nothing, so the prefix cache stays empty")
    return lines


def _requests_that_fit(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> float:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    return get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)


def _without_policy(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    groups = [
        replace(group, kv_cache_spec=replace(group.kv_cache_spec, context_budget=None))
        if isinstance(group.kv_cache_spec, RetentionSpec)
        else group
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups)
