"""Gemma 2: every other layer slides, and attention logits are capped."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING


@dataclass(frozen=True, kw_only=True)
class Gemma2Adapter(DecoderAdapter):
    """The first layer slides, the second is full, and so on."""

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        return SLIDING if index % 2 == 0 else FULL


ADAPTER = Gemma2Adapter(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    defaults={"head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
)
