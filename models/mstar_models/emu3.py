"""Emu3 and Chameleon: decoders over text, image and video tokens alike."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="emu3",
    architectures=("Emu3ForCausalLM", "Emu3ForConditionalGeneration"),
    theta=1_000_000.0,
)
CHAMELEON_ADAPTER = DecoderAdapter(
    name="chameleon", architectures=("ChameleonForConditionalGeneration",)
)
