"""Qwen 2 and 2.5, dense and mixtures of experts, and their vision-language models (Cosmos-Reason
1).
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING


@dataclass(frozen=True, kw_only=True)
class QwenAdapter(DecoderAdapter):
    """Layers from `max_window_layers` on slide, and only where `use_sliding_window` is true."""

    window_default_on: bool = False

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        if self.window(config) is None:
            return FULL
        first_sliding = config.whole_number("max_window_layers")
        return SLIDING if index >= first_sliding else FULL


WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

ADAPTER = QwenAdapter(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    defaults=WINDOW_DEFAULTS,
)

VISION_LANGUAGE_ADAPTER = QwenAdapter(
    name="qwen2_vl",
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    defaults=WINDOW_DEFAULTS | {"max_window_layers": 80},
    theta=1_000_000.0,
)
