"""Phi 1 to 4: full attention or one window for all layers, part of a head turned in some sizes."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="phi3", architectures=("Phi3ForCausalLM", "Phi3VForCausalLM", "Phi4MMForCausalLM")
)

PHI_MOE_ADAPTER = DecoderAdapter(
    name="phimoe", architectures=("PhiMoEForCausalLM",), theta=1_000_000.0
)

PHI_ADAPTER = DecoderAdapter(name="phi", architectures=("PhiForCausalLM",), rotary_fraction=0.5)
