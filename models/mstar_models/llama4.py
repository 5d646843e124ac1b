"""Llama 4: layers in chunks with rotary positions, and full ones without in between."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import CHUNKED, FULL
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class Llama4Adapter(DecoderAdapter):
    """`no_rope_layers` marks layers with rotary positions by 1; those attend within chunks."""

    theta: float = 500_000.0

    def layer_types(self, config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        in_chunks = CHUNKED if config.get("attention_chunk_size") else FULL
        return tuple(
            in_chunks if has_rotary(config, num_layers, index) else FULL
            for index in range(num_layers)
        )

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if not has_rotary(config, len(types), index):
            return None
        return super().rotary(config, types, index, head_dim)


def has_rotary(config: ConfigReader, num_layers: int, index: int) -> bool:
    """Whether layer `index` turns its keys: `no_rope_layers`, else all but every fourth layer."""
    if config.get("no_rope_layers"):
        listed = config.sequence("no_rope_layers", length=num_layers)
        assert listed is not None, "an absent list is handled by the rule below"
        return bool(listed[index])
    interval = config.optional_count("no_rope_layer_interval") or 4
    return (index + 1) % interval != 0


ADAPTER = Llama4Adapter(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    defaults={"attention_chunk_size": 8192, "head_dim": 128},
)
