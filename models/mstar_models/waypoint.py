"""Waypoint, a frame world model: which frames each layer keeps in its ring.

Every fourth layer looks far back through few frames, the others see the last consecutive ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.adapters import ConfigReader, DecoderAdapter, HFConfig
from mstar_plugin.adapters.refusals import RINGS
from mstar_plugin.kv.config import RingKVConfig, RingKVLayerConfig
from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV

NUM_LAYERS = 24
NUM_QO_HEADS = 32
NUM_KV_HEADS = 16
HEAD_DIM = 64
TOKENS_PER_FRAME = {"720p": 512, "360p": 128}

LOCAL = RingKVLayerConfig(ring_frames=16, ring_buckets=16, pinned_dilation=1)
GLOBAL = RingKVLayerConfig(ring_frames=16, ring_buckets=16, pinned_dilation=8)
FULL_GLOBAL = RingKVLayerConfig(ring_frames=128, ring_buckets=16, pinned_dilation=8)


def ring_layers(
    num_layers: int = NUM_LAYERS, *, full_global_ring: bool = False
) -> tuple[RingKVLayerConfig, ...]:
    """One geometry per layer: 16 consecutive frames, and 16 frames 8 apart in every fourth layer.

    `full_global_ring` allocates 128 frames for the latter, as the reference implementation does; 16
    of them are ever used, so the result is the same.
    Example: 8 layers -> layers 3 and 7 are global.
    """
    wide = FULL_GLOBAL if full_global_ring else GLOBAL
    return tuple(wide if index % 4 == 3 else LOCAL for index in range(num_layers))


def ring_config(
    resolution: str = "720p", *, num_sessions: int = 1, full_global_ring: bool = False
) -> RingKVConfig:
    """The ring cache of the released model: 24 layers, 32 query and 16 KV heads of 64.

    ValueError for a resolution other than 720p (512 tokens a frame) and 360p (128).
    """
    if resolution not in TOKENS_PER_FRAME:
        raise ValueError(
            f"resolution must be one of {sorted(TOKENS_PER_FRAME)}, got {resolution!r}"
        )
    return RingKVConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_qo_heads=NUM_QO_HEADS,
        tokens_per_frame=TOKENS_PER_FRAME[resolution],
        layers=ring_layers(full_global_ring=full_global_ring),
        num_sessions=num_sessions,
    )


@dataclass(frozen=True, kw_only=True)
class WaypointAdapter(DecoderAdapter):
    """A ring per layer. `tokens_per_frame` and `full_global_ring` choose the geometry."""

    refusal: str | None = RINGS

    def declare(self, hf_config: HFConfig) -> ModelKV:
        config = ConfigReader.of(hf_config, defaults=self.defaults)
        num_layers = config.count("num_hidden_layers")
        shape = self.head_shape(config, ("full_attention",) * num_layers, 0)
        return ModelKV(
            architecture=config.architecture,
            layers=tuple(
                LayerKV(
                    index=index,
                    kind=LayerKind.RING,
                    num_kv_heads=shape.num_kv_heads,
                    num_qo_heads=shape.num_qo_heads,
                    head_dim=shape.head_dim,
                )
                for index in range(num_layers)
            ),
            retention_refusal=self.refusal,
            ring=RingKVConfig(
                num_layers=num_layers,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                num_qo_heads=shape.num_qo_heads,
                tokens_per_frame=config.count("tokens_per_frame"),
                layers=ring_layers(
                    num_layers, full_global_ring=config.flag("full_global_ring", default=False)
                ),
            ),
        )


ADAPTER = WaypointAdapter(
    name="waypoint",
    architectures=("WaypointWorldModel",),
    defaults={
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_QO_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "tokens_per_frame": TOKENS_PER_FRAME["720p"],
    },
)
