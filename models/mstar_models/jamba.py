"""Jamba: an attention layer without positions in every period of Mamba layers."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class JambaAdapter(DecoderAdapter):
    """Layer `attn_layer_offset` of every `attn_layer_period` has KV."""

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        period = config.count("attn_layer_period")
        offset = config.whole_number("attn_layer_offset")
        return FULL if index % period == offset else "linear_attention"

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        return None


ADAPTER = JambaAdapter(
    name="jamba",
    architectures=("JambaForCausalLM",),
    defaults={"attn_layer_period": 8, "attn_layer_offset": 4},
)
