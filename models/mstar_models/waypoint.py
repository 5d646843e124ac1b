"""Waypoint, a frame world model: which frames each layer keeps in its ring.

Every fourth layer looks far back through few frames, the others see the last consecutive ones.
"""

from __future__ import annotations

from mstar_plugin.kv.config import RingKVConfig, RingKVLayerConfig

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
