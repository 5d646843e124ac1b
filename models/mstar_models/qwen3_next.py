"""Qwen3-Next and Qwen 3.5: three linear-attention layers, then a full one."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL


@dataclass(frozen=True, kw_only=True)
class QwenNextAdapter(DecoderAdapter):
    """Every `full_attention_interval`-th layer has KV; a quarter of its heads is turned."""

    rotary_fraction: float = 0.25

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        interval = config.optional_count("full_attention_interval") or 4
        return "linear_attention" if (index + 1) % interval else FULL


ADAPTER = QwenNextAdapter(
    name="qwen3_next",
    architectures=(
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    defaults={"head_dim": 256},
)
