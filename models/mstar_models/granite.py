"""Granite 3 and 4: dense, mixtures of experts, sliding windows with sinks, and Mamba hybrids."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.model_kv import LayerKV, Rotary


@dataclass(frozen=True, kw_only=True)
class GraniteAdapter(DecoderAdapter):
    """Files that list `layer_types` have sinks unless `attention_sinks` is false.

    `layer_rope_theta` gives each layer a rotary base, 0 for none.
    """

    def layer(self, config: ConfigReader, types: tuple[str, ...], index: int) -> LayerKV:
        has_sinks = config.flag("attention_sinks", default=config.get("layer_types") is not None)
        return replace(super().layer(config, types, index), has_sinks=has_sinks)

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        return "full_attention"

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        rotary = super().rotary(config, types, index, head_dim)
        bases = config.sequence("layer_rope_theta", length=len(types))
        if rotary is None or bases is None:
            return rotary
        return replace(rotary, theta=float(bases[index])) if bases[index] else None


@dataclass(frozen=True, kw_only=True)
class GraniteHybridAdapter(DecoderAdapter):
    """Mamba and attention layers; `position_embedding_type` decides on rotary positions."""

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        return "linear_attention"

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if config.get("position_embedding_type") != "rope":
            return None
        return super().rotary(config, types, index, head_dim)


ADAPTER = GraniteAdapter(
    name="granite",
    architectures=(
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteSWAForCausalLM",
        "GraniteMoeSWAForCausalLM",
    ),
)

HYBRID_ADAPTER = GraniteHybridAdapter(
    name="granitemoehybrid", architectures=("GraniteMoeHybridForCausalLM",)
)
