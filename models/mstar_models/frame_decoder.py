"""Decoders of frame tokens: Llama blocks whose `config.json` declares a ring per layer.

    "mstar": {"ring": {"tokens_per_frame": 16, "layers": {"ring_buckets": 16}}}

Without that block they are declared as the Llama models they are then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HFConfig
from mstar_plugin.adapters.refusals import RINGS
from mstar_plugin.kv.config import RingKVConfig
from mstar_plugin.model_kv import LayerKind, ModelKV
from mstar_plugin.ring.declaration import ring_declaration


@dataclass(frozen=True, kw_only=True)
class FrameDecoderAdapter(DecoderAdapter):
    """A ring per layer, read from the `mstar` block."""

    def declare(self, hf_config: HFConfig) -> ModelKV:
        model = super().declare(hf_config)
        table = ConfigReader.of(hf_config).mapping("mstar").get("ring")
        if table is None:
            return model
        ring = ring_declaration(table, "mstar['ring']", len(model.layers))
        first = model.layers[0]
        return replace(
            model,
            layers=tuple(replace(layer, kind=LayerKind.RING) for layer in model.layers),
            retention_refusal=RINGS,
            ring=RingKVConfig(
                num_layers=len(model.layers),
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_dim,
                num_qo_heads=first.num_qo_heads,
                tokens_per_frame=ring.tokens_per_frame,
                layers=ring.layers,
            ),
        )


ADAPTER = FrameDecoderAdapter(name="frame_decoder", architectures=("FrameDecoderForCausalLM",))
