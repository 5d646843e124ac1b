"""Command R (full attention) and Command A / R7B (three sliding layers, then a full one)."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class Cohere2Adapter(DecoderAdapter):
    """Full layers have no rotary positions; a window of W means W keys besides the query."""

    interleaved: bool = True
    window_beside_query: bool = True

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        pattern = config.optional_count("sliding_window_pattern") or 4
        return SLIDING if (index + 1) % pattern else FULL

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if types[index] != SLIDING:
            return None
        return super().rotary(config, types, index, head_dim)


ADAPTER = DecoderAdapter(
    name="cohere", architectures=("CohereForCausalLM",), theta=500_000.0, interleaved=True
)

COHERE2_ADAPTER = Cohere2Adapter(
    name="cohere2",
    architectures=("Cohere2ForCausalLM", "Cohere2VisionForConditionalGeneration"),
    defaults={"sliding_window": 4096},
)
