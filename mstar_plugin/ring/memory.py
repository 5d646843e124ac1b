"""Bytes of a ring cache, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.kv.config import RingKVConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RingMemory:
    """K/V bytes of a ring cache. `total_sessions` counts the padding session, which is allocated
    like any other.
    """

    session_bytes: int
    total_sessions: int

    @property
    def total_bytes(self) -> int:
        return self.session_bytes * self.total_sessions

    def __str__(self) -> str:
        return (
            f"{self.total_bytes / 2**20:.1f} MiB for {self.total_sessions} sessions "
            f"(one of them for padding rows) of {self.session_bytes / 2**20:.1f} MiB"
        )


def layer_session_bytes(config: RingKVConfig, layer_index: int, itemsize: int) -> int:
    """K/V bytes one session takes in one layer, its scratch frame included.

    Example: 16 ring frames, 512 tokens a frame, 16 heads of 64, itemsize 2 -> 17 * 512 * 4096 bytes
    = 34 MiB.
    """
    slots = (config.layers[layer_index].ring_frames + 1) * config.tokens_per_frame
    return slots * 2 * config.num_kv_heads * config.head_dim * itemsize


def ring_memory(config: RingKVConfig, itemsize: int) -> RingMemory:
    """Memory of the whole cache, for elements of `itemsize` bytes."""
    per_layer = (layer_session_bytes(config, i, itemsize) for i in range(config.num_layers))
    return RingMemory(session_bytes=sum(per_layer), total_sessions=config.total_sessions)
