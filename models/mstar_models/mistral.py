"""Mistral, Mixtral and Ministral: one window for all layers, or none."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    defaults={"sliding_window": 4096},
)

MISTRAL3_ADAPTER = DecoderAdapter(
    name="mistral3",
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    defaults={"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    theta=1_000_000.0,
)

MIXTRAL_ADAPTER = DecoderAdapter(
    name="mixtral", architectures=("MixtralForCausalLM",), theta=1_000_000.0
)
