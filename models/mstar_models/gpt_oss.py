"""gpt-oss: sliding and full layers in turn, a learned sink in every head."""

from mstar_models.gemma2 import Gemma2Adapter

ADAPTER = Gemma2Adapter(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    defaults={"head_dim": 64, "sliding_window": 128},
    theta=150_000.0,
    has_sinks=True,
)
