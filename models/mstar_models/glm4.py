"""GLM-4 and 4.5: half of each head is turned, in neighbouring pairs for the dense models."""

from mstar_plugin.adapters import DecoderAdapter, LatentDecoderAdapter

ADAPTER = DecoderAdapter(
    name="glm4",
    architectures=("GlmForCausalLM", "Glm4ForCausalLM"),
    defaults={"head_dim": 128},
    rotary_fraction=0.5,
    interleaved=True,
)

MOE_ADAPTER = DecoderAdapter(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    rotary_fraction=0.5,
)

MOE_LITE_ADAPTER = LatentDecoderAdapter(
    name="glm4_moe_lite", architectures=("Glm4MoeLiteForCausalLM",)
)
