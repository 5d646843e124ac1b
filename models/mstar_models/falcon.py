"""Falcon 7B, 40B and 180B (multi-query or grouped heads), and its ALiBi variants; Bloom."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HeadShape
from mstar_plugin.adapters.refusals import ALIBI
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class FalconAdapter(DecoderAdapter):
    """`num_kv_heads` counts only with `new_decoder_architecture`; else `multi_query` decides."""

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        shape = super().head_shape(config, types, index)
        if config.flag("new_decoder_architecture", default=False):
            return shape
        multi_query = config.flag("multi_query", default=True)
        return HeadShape(
            num_kv_heads=1 if multi_query else shape.num_qo_heads,
            num_qo_heads=shape.num_qo_heads,
            head_dim=shape.head_dim,
        )

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if config.flag("alibi", default=False):
            return None
        return super().rotary(config, types, index, head_dim)

    def retention_refusal(self, config: ConfigReader, types: tuple[str, ...]) -> str | None:
        if config.flag("alibi", default=False):
            return ALIBI
        return super().retention_refusal(config, types)


ADAPTER = FalconAdapter(
    name="falcon",
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    defaults={"max_position_embeddings": 2048},
)
BLOOM_ADAPTER = FalconAdapter(
    name="bloom",
    architectures=("BloomForCausalLM",),
    defaults={"alibi": True, "multi_query": False},
)
