"""Nemotron: dense with half-turned heads, pruned with heads that differ by layer, Mamba hybrids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HeadShape
from mstar_plugin.adapters.layer_types import FULL
from mstar_plugin.model_kv import Rotary

PATTERN_LETTERS = {"*": FULL, "M": "linear_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, kw_only=True)
class NemotronHAdapter(DecoderAdapter):
    """`hybrid_override_pattern` has one letter per layer, `*` for attention; nothing is turned."""

    def layer_types(self, config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        pattern = config.get("hybrid_override_pattern")
        if pattern is None:
            return super().layer_types(config, num_layers)
        if not isinstance(pattern, str) or not set(pattern) <= PATTERN_LETTERS.keys():
            letters = " ".join(PATTERN_LETTERS)
            raise ValueError(f"hybrid_override_pattern must be made of {letters}, got {pattern!r}")
        if len(pattern) != num_layers:
            raise ValueError(
                f"hybrid_override_pattern must have one letter per layer ({num_layers}), "
                f"got {len(pattern)}"
            )
        return tuple(PATTERN_LETTERS[letter] for letter in pattern)

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        return None


@dataclass(frozen=True, kw_only=True)
class PrunedNemotronAdapter(DecoderAdapter):
    """`block_configs` says per layer how many query heads share a KV head, or that it has none."""

    def layer_types(self, config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        return tuple(
            "mlp" if _attention(config, num_layers, index).get("no_op") else FULL
            for index in range(num_layers)
        )

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        num_qo_heads = config.count("num_attention_heads")
        in_group = _attention(config, len(types), index).get("n_heads_in_group")
        if type(in_group) is not int or in_group <= 0 or num_qo_heads % in_group:
            raise ValueError(
                f"n_heads_in_group of layer {index} in block_configs must divide "
                f"num_attention_heads ({num_qo_heads}), got {in_group!r}"
            )
        return HeadShape(
            num_kv_heads=num_qo_heads // in_group,
            num_qo_heads=num_qo_heads,
            head_dim=self.head_dim(config, num_qo_heads),
        )


def _attention(config: ConfigReader, num_layers: int, index: int) -> Mapping[str, Any]:
    blocks = config.sequence("block_configs", length=num_layers)
    if blocks is None:
        raise ValueError("block_configs must be in the config of a pruned Nemotron, got none")
    block = blocks[index]
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ValueError(f"block_configs must describe attention in layer {index}, got {block!r}")
    return attention


ADAPTER = DecoderAdapter(
    name="nemotron", architectures=("NemotronForCausalLM",), rotary_fraction=0.5
)
PRUNED_ADAPTER = PrunedNemotronAdapter(name="nemotron_nas", architectures=("DeciLMForCausalLM",))
HYBRID_ADAPTER = NemotronHAdapter(name="nemotron_h", architectures=("NemotronHForCausalLM",))
