"""OLMo 1 to 3 and OLMoE: full attention; OLMo 3 slides in three layers of four."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter
from mstar_plugin.adapters.layer_types import FULL, SLIDING
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class Olmo3Adapter(DecoderAdapter):
    """Older files scale the rotary frequencies of the full layers only."""

    theta: float = 500_000.0

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        return SLIDING if (index + 1) % 4 else FULL

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if types[index] == FULL or config.mapping("rope_parameters"):
            return super().rotary(config, types, index, head_dim)
        return Rotary(theta=config.number("rope_theta") or self.theta, rotary_dim=head_dim)


ADAPTER = DecoderAdapter(
    name="olmo", architectures=("OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM")
)

OLMO3_ADAPTER = Olmo3Adapter(
    name="olmo3", architectures=("Olmo3ForCausalLM",), defaults={"sliding_window": 4096}
)
