"""Gemma 3: five sliding layers, then a full one, each kind with a rotary base of its own."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING
from mstar_plugin.model_kv import Rotary

LOCAL_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Gemma3Adapter(DecoderAdapter):
    """Older files scale the full layers by `rope_scaling` and give the others
    `rope_local_base_freq`.
    """

    theta: float = 1_000_000.0
    full_every: int = 6

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        pattern = config.optional_count("sliding_window_pattern") or self.full_every
        return SLIDING if (index + 1) % pattern else FULL

    def window(self, config: ConfigReader) -> int | None:
        window = super().window(config)
        is_bidirectional = config.get("use_bidirectional_attention") in (True, "all")
        return window // 2 + 1 if window is not None and is_bidirectional else window

    def soft_cap(self, config: ConfigReader) -> float | None:
        return None

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if types[index] == FULL or config.mapping("rope_parameters"):
            return super().rotary(config, types, index, head_dim)
        theta = config.number("rope_local_base_freq") or LOCAL_THETA
        return Rotary(theta=theta, rotary_dim=head_dim)


ADAPTER = Gemma3Adapter(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
)
