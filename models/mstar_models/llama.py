"""Llama 1 to 3 and the decoders that are built exactly like it."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="llama",
    architectures=(
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        "InternLM3ForCausalLM",
        "IQuestCoderForCausalLM",
        "SolarForCausalLM",
        "TeleChat3ForCausalLM",
    ),
)
