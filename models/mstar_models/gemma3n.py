"""Gemma 3n: four sliding layers, then a full one; the last layers read the KV of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_models.gemma3 import Gemma3Adapter
from mstar_plugin.adapters import ConfigReader


@dataclass(frozen=True, kw_only=True)
class SharingGemmaAdapter(Gemma3Adapter):
    """The last `num_kv_shared_layers` layers read the last layer of their type before them."""

    def shares_kv_with(
        self, config: ConfigReader, types: tuple[str, ...], index: int
    ) -> int | None:
        first_shared = len(types) - config.whole_number("num_kv_shared_layers")
        if index < first_shared:
            return None
        for earlier in reversed(range(first_shared)):
            if types[earlier] == types[index]:
                return earlier
        raise ValueError(
            f"num_kv_shared_layers must leave a {types[index]} layer for layer {index} to share, "
            f"got {len(types) - first_shared} of {len(types)} layers"
        )


ADAPTER = SharingGemmaAdapter(
    name="gemma3n",
    architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    full_every=5,
    defaults={
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "max_position_embeddings": 32_768,
    },
)
