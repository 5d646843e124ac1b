"""SmolLM3: every fourth layer has no rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_models.llama4 import has_rotary
from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class SmolLM3Adapter(DecoderAdapter):
    """Where a window is switched on, it is the layers without rotary positions that slide."""

    theta: float = 2_000_000.0
    window_default_on: bool = False

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        if self.window(config) is None:
            return FULL
        num_layers = config.count("num_hidden_layers")
        return FULL if has_rotary(config, num_layers, index) else SLIDING

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if not has_rotary(config, len(types), index):
            return None
        return super().rotary(config, types, index, head_dim)


ADAPTER = SmolLM3Adapter(name="smollm3", architectures=("SmolLM3ForCausalLM",))
