"""StableLM: a quarter of each head is turned."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="stablelm",
    architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    rotary_fraction=0.25,
)
