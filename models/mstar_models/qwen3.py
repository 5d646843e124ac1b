"""Qwen 3, dense and mixtures of experts, and its vision-language models (Cosmos-Reason 2)."""

from mstar_models.qwen2 import WINDOW_DEFAULTS, QwenAdapter

ADAPTER = QwenAdapter(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    defaults=WINDOW_DEFAULTS | {"head_dim": 128},
)

VISION_LANGUAGE_ADAPTER = QwenAdapter(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    defaults={"head_dim": 128},
    theta=500_000.0,
)
