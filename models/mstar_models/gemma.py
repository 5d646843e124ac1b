"""Gemma 1: full attention with heads of 256."""

from mstar_plugin.adapters import DecoderAdapter

ADAPTER = DecoderAdapter(
    name="gemma", architectures=("GemmaForCausalLM",), defaults={"head_dim": 256}
)
