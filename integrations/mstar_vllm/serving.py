"""What one server does: its model, its policy, and why requests cannot be bounded where they
cannot.

A pure function of vLLM's configuration, so that the front end, the scheduler and the workers agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_plugin.adapters import Adapter, find_adapter, refusals
from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.model_kv import LayerKind, ModelKV
from mstar_vllm.positions import policy_with
from mstar_vllm.ring_plan import RingPlan, ring_plan
from mstar_vllm.rolling_start import choose_positions
from mstar_vllm.settings import Settings, settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GENERIC = "generic"
RINGS = "ring caches"
_TEXT_DRAFTS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """adapter: name of the model's adapter. model: what it declares, None without an adapter.
    retention: the server's policy. obstacle: why no request can be bounded, None where it can.
    ring: the rings that its layers keep, None for none. not_rolling: why the policy's positions are
    absolute though nobody asked for that, None where they are not."""

    settings: Settings
    adapter: str
    model: ModelKV | None
    retention: RetentionPolicy | None
    obstacle: str | None
    ring: RingPlan | None = None
    not_rolling: str | None = None


def serving_plan(vllm_config: VllmConfig) -> ServingPlan:
    """The plan that `vllm_config` asks for; ValueError where it cannot be honoured."""
    settings = settings_of(vllm_config)
    name, model = declared_model(vllm_config)
    ring = ring_plan(vllm_config, settings, model)
    if ring is not None:
        _check_ring_features(vllm_config, model)
    obstacle = retention_obstacle(vllm_config, model) if ring is None else RINGS
    if settings.retention is not None and obstacle is not None:
        raise ValueError(
            f"mstar cannot bound requests with {obstacle}; leave out "
            "additional_config['mstar']['retention'] or that feature"
        )
    retention = settings.retention
    if retention is None and obstacle is None and model is not None:
        retention = model.retention
    not_rolling = None
    if retention is not None and retention.protected_prefix:
        positions, not_rolling = choose_positions(vllm_config, settings, model)
        retention = policy_with(retention.context_budget, retention.protected_prefix, positions)
    return ServingPlan(
        settings=settings,
        adapter=name,
        model=model,
        retention=retention,
        obstacle=obstacle,
        ring=ring,
        not_rolling=not_rolling,
    )


def declared_model(vllm_config: VllmConfig) -> tuple[str, ModelKV | None]:
    """The adapter's name and its declaration; ("generic", None) where nobody speaks for it."""
    model_config = vllm_config.model_config
    adapter: Adapter | None = find_adapter(model_config.architectures)
    if adapter is None:
        return GENERIC, None
    return adapter.name, adapter.declare(model_config.hf_config)


def retention_obstacle(vllm_config: VllmConfig, model: ModelKV | None) -> str | None:
    """The first feature of this server that rules out bounded requests, or None."""
    feature = _obstructing_feature(vllm_config)
    if feature is not None:
        return feature
    if model is not None:
        return model.retention_refusal or _table_obstacle(vllm_config, model)
    return _generic_obstacle(vllm_config)


def _obstructing_feature(vllm_config: VllmConfig) -> str | None:
    return next((feature for feature, present in _OBSTACLES if present(vllm_config)), None)


def _check_ring_features(vllm_config: VllmConfig, model: ModelKV | None) -> None:
    feature = _obstructing_feature(vllm_config)
    if feature is None:
        feature = _generic_obstacle(vllm_config) if model is None else _ring_obstacle(model)
    if feature is not None:
        raise ValueError(
            f"mstar cannot keep ring caches with {feature}; leave out the ring or that feature"
        )


def _ring_obstacle(model: ModelKV) -> str | None:
    """What rules out dropping the model's keys rules out dropping frames."""
    if any(layer.shares_kv_with is not None for layer in model.layers):
        return "layers that read another layer's keys"
    return None if model.retention_refusal == refusals.RINGS else model.retention_refusal


def in_flight_tokens(vllm_config: VllmConfig) -> int:
    """Tokens of one request that can be scheduled before its processed ones let blocks go."""
    return vllm_config.max_in_flight_tokens + vllm_config.num_speculative_tokens


def _table_obstacle(vllm_config: VllmConfig, model: ModelKV) -> str | None:
    """Learned positions end with their table; rotary ones do not."""
    if model.max_positions is None or any(layer.rotary for layer in model.layers):
        return None
    if vllm_config.model_config.max_model_len > model.max_positions:
        return f"learned positions past their table of {model.max_positions}"
    return None


def _generic_obstacle(vllm_config: VllmConfig) -> str | None:
    config = vllm_config.model_config.hf_text_config
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        return "ALiBi"
    return None


def _has_windows_without_hybrid_manager(config: VllmConfig) -> bool:
    if not config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    _, model = declared_model(config)
    if model is None:
        return config.model_config.get_sliding_window() is not None
    return any(layer.kind is not LayerKind.FULL for layer in model.layers)


def drafts_with_a_model(config: VllmConfig) -> bool:
    """Whether speculation brings layers of its own."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method not in _TEXT_DRAFTS


_OBSTACLES: tuple[tuple[str, Callable[[VllmConfig], bool]], ...] = (
    ("MLA attention", lambda config: config.model_config.use_mla),
    ("an encoder-decoder model", lambda config: config.model_config.is_encoder_decoder),
    ("a pooling model", lambda config: config.model_config.runner_type != "generate"),
    ("state-space layers", lambda config: config.model_config.is_hybrid),
    ("bidirectional prefixes", lambda config: config.model_config.is_mm_prefix_lm),
    ("reference sliding windows", lambda config: config.model_config.rswa_window is not None),
    (
        "decode context parallelism",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
    ),
    (
        "prefill context parallelism",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    ),
    ("dual-batch overlap", lambda config: config.parallel_config.use_ubatching),
    ("a KV connector", lambda config: config.kv_transfer_config is not None),
    ("fast prefill", lambda config: config.cache_config.kv_sharing_fast_prefill),
    ("the hybrid KV cache manager disabled", _has_windows_without_hybrid_manager),
    ("speculation by a draft model", drafts_with_a_model),
)
