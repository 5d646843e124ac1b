"""Gemma 4: full layers have larger heads, and may have fewer of them, than the sliding ones."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_models.gemma3 import LOCAL_THETA
from mstar_models.gemma3n import SharingGemmaAdapter
from mstar_plugin.adapters import ConfigReader, HeadShape
from mstar_plugin.adapters.layer_types import FULL
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class Gemma4Adapter(SharingGemmaAdapter):
    """The last layer is always full; full layers turn a quarter of their pairs where nothing is
    said.
    """

    def layer_types(self, config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        return (*super().layer_types(config, num_layers)[:-1], FULL)

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        shape = super().head_shape(config, types, index)
        if types[index] != FULL or config.get("per_layer_config"):
            return shape
        num_kv_heads = shape.num_kv_heads
        if config.flag("attention_k_eq_v", default=False):
            num_kv_heads = config.optional_count("num_global_key_value_heads") or num_kv_heads
        return HeadShape(
            num_kv_heads=num_kv_heads,
            num_qo_heads=shape.num_qo_heads,
            head_dim=config.count("global_head_dim"),
        )

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if config.mapping("rope_parameters"):
            return super().rotary(config, types, index, head_dim)
        if types[index] != FULL:
            return Rotary(theta=LOCAL_THETA, rotary_dim=head_dim)
        return Rotary(
            theta=self.theta,
            rotary_dim=head_dim,
            scaling="proportional",
            parameters=(("partial_rotary_factor", 0.25),),
        )


ADAPTER = Gemma4Adapter(
    name="gemma4",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
    },
)
