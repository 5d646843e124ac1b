"""Multi-head latent attention: one compressed row per token that all query heads read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_plugin.adapters import refusals
from mstar_plugin.adapters.decoder import DecoderAdapter
from mstar_plugin.model_kv import LayerKind, LayerKV

if TYPE_CHECKING:
    from mstar_plugin.adapters.hf_config import ConfigReader


@dataclass(frozen=True, kw_only=True)
class LatentDecoderAdapter(DecoderAdapter):
    """Decoders whose layers store `kv_lora_rank + qk_rope_head_dim` elements per token (DeepSeek V2
    and later).

    Example: ranks 512 and 64 -> 576 elements per token and layer, for 16 query heads as for 128.
    """

    interleaved: bool = True
    refusal: str | None = refusals.LATENT

    def layer(self, config: ConfigReader, types: tuple[str, ...], index: int) -> LayerKV:
        rank = config.count("kv_lora_rank")
        rope_dim = config.count("qk_rope_head_dim")
        return LayerKV(
            index=index,
            kind=LayerKind.MLA,
            num_kv_heads=1,
            num_qo_heads=config.counts("num_attention_heads", len(types))[index],
            head_dim=rank + rope_dim,
            rotary=self.rotary(config, types, index, rope_dim),
            kv_lora_rank=rank,
            qk_rope_head_dim=rope_dim,
        )
