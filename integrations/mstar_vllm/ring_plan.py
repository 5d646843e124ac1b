"""Which rings a server keeps: from its settings, the model's `config.json` or the adapter.

The first of the three that speaks of a ring decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mstar_plugin.kv.config import RingKVLayerConfig
from mstar_plugin.model_kv import ModelKV
from mstar_plugin.ring.declaration import RingDeclaration, ring_declaration
from mstar_plugin.ring.paging import FramePages, chunk_frames
from mstar_vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FRAME_MULTIPLE = 16
_CONFIG_JSON = "config.json's 'mstar'"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """tokens_per_frame: tokens of a frame, which is one page. layers: geometry of every layer.
    chunk_tokens: most tokens of one request in one step.
    """

    tokens_per_frame: int
    layers: tuple[RingKVLayerConfig, ...]
    chunk_tokens: int

    def pages(self, layer_index: int) -> FramePages:
        """The pages a request holds in a layer."""
        geometry = self.layers[layer_index]
        return FramePages(
            dilation=geometry.pinned_dilation,
            buckets=geometry.ring_buckets,
            chunk_frames=chunk_frames(self.chunk_tokens, self.tokens_per_frame),
        )


def ring_plan(
    vllm_config: VllmConfig, settings: Settings, model: ModelKV | None
) -> RingPlan | None:
    """The rings of `vllm_config`'s server, None where nobody asks for any.

    ValueError where they cannot be kept as asked.
    """
    declared = _declared(vllm_config, settings, model)
    if declared is None:
        return None
    plan = RingPlan(
        tokens_per_frame=declared.tokens_per_frame,
        layers=declared.layers,
        chunk_tokens=_chunk_tokens(vllm_config),
    )
    _check_frame(vllm_config, plan)
    _check_chunk(vllm_config, plan)
    _check_server(vllm_config)
    return plan


def config_ring(vllm_config: VllmConfig) -> Any:
    """The ring table of the model's `config.json`, None where it has none."""
    config = vllm_config.model_config.hf_config
    block = getattr(config, "mstar", None)
    if block is None:
        return None
    if not isinstance(block, Mapping) or set(block) != {"ring"}:
        raise ValueError(f"{_CONFIG_JSON} must be a table with 'ring', got {block!r:.40}")
    return block["ring"]


def adopt_frame_as_block(vllm_config: VllmConfig, plan: RingPlan) -> None:
    """Make the frame the server's block, as if the command line had said so."""
    vllm_config.cache_config.block_size = plan.tokens_per_frame
    vllm_config.cache_config.user_specified_block_size = True


def _declared(
    vllm_config: VllmConfig, settings: Settings, model: ModelKV | None
) -> RingDeclaration | None:
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if settings.ring is not None:
        where = "additional_config['mstar']['ring']"
        return ring_declaration(settings.ring, where, num_layers)
    in_config = config_ring(vllm_config)
    if in_config is not None:
        return ring_declaration(in_config, f"{_CONFIG_JSON}['ring']", num_layers)
    if model is None or model.ring is None:
        return None
    return RingDeclaration(tokens_per_frame=model.ring.tokens_per_frame, layers=model.ring.layers)


def _chunk_tokens(vllm_config: VllmConfig) -> int:
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    longest = vllm_config.model_config.max_model_len
    return min(budget, longest) + vllm_config.num_speculative_tokens


def _check_frame(vllm_config: VllmConfig, plan: RingPlan) -> None:
    cache, frame = vllm_config.cache_config, plan.tokens_per_frame
    if frame % FRAME_MULTIPLE:
        raise ValueError(
            f"tokens_per_frame must be a multiple of {FRAME_MULTIPLE} with mstar, got {frame}"
        )
    if cache.user_specified_block_size and cache.block_size != frame:
        raise ValueError(
            f"--block-size must be left out or be the frame's {frame} tokens with ring caches, "
            f"got {cache.block_size}"
        )


def _check_chunk(vllm_config: VllmConfig, plan: RingPlan) -> None:
    ring = min(layer.ring_buckets for layer in plan.layers) * plan.tokens_per_frame
    if plan.chunk_tokens > ring:
        raise ValueError(
            f"--max-num-batched-tokens must be at most the {ring} tokens of the smallest ring less "
            f"the speculative tokens, got "
            f"{vllm_config.scheduler_config.max_num_batched_tokens}: set it lower"
        )


def _check_server(vllm_config: VllmConfig) -> None:
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "mstar keeps ring caches with the hybrid KV cache manager, got "
            "--disable-hybrid-kv-cache-manager; leave it out"
        )
