"""GPT-NeoX and Pythia: a quarter of each head is turned, under key names of their own."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HeadShape
from mstar_plugin.adapters.rotary import rotary_of
from mstar_plugin.model_kv import Rotary


@dataclass(frozen=True, kw_only=True)
class GPTNeoXAdapter(DecoderAdapter):
    """Older files name the settings `rotary_emb_base` and `rotary_pct`; every head has its KV."""

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        num_heads = config.count("num_attention_heads")
        return HeadShape(
            num_kv_heads=num_heads,
            num_qo_heads=num_heads,
            head_dim=self.head_dim(config, num_heads),
        )

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        fraction = config.number("rotary_pct")
        return rotary_of(
            config,
            head_dim=head_dim,
            layer_type=types[index],
            theta=config.number("rotary_emb_base") or self.theta,
            fraction=0.25 if fraction is None else fraction,
        )


ADAPTER = GPTNeoXAdapter(name="gpt_neox", architectures=("GPTNeoXForCausalLM",))
