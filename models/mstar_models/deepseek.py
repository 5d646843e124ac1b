"""DeepSeek: V1 with ordinary heads, V2 and V3 (also Kimi K2) with latent attention."""

from mstar_plugin.adapters import DecoderAdapter, LatentDecoderAdapter

ADAPTER = LatentDecoderAdapter(
    name="deepseek",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
)

V1_ADAPTER = DecoderAdapter(name="deepseek_v1", architectures=("DeepseekForCausalLM",))
