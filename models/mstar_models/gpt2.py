"""GPT-2, GPT-BigCode and OPT: learned absolute positions, so a generation ends with their table."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HeadShape
from mstar_plugin.adapters.refusals import LEARNED_POSITIONS
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class LearnedPositionsAdapter(DecoderAdapter):
    """Positions are added to the embeddings; heads are not turned. `multi_query` leaves one KV
    head.
    """

    refusal: str | None = LEARNED_POSITIONS

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        num_qo_heads = config.count("num_attention_heads")
        return HeadShape(
            num_kv_heads=1 if config.flag("multi_query", default=False) else num_qo_heads,
            num_qo_heads=num_qo_heads,
            head_dim=self.head_dim(config, num_qo_heads),
        )

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        return None


ADAPTER = LearnedPositionsAdapter(
    name="gpt2",
    architectures=("GPT2LMHeadModel", "OPTForCausalLM"),
)

BIGCODE_ADAPTER = LearnedPositionsAdapter(
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    defaults={"multi_query": True},
)
