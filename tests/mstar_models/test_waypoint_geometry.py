import pytest
import torch

from mstar_models.waypoint import FULL_GLOBAL, GLOBAL, LOCAL, ring_config, ring_layers
from mstar_plugin.ring.cache import LayerRingCache
from mstar_plugin.ring.geometry import visible_slots
from mstar_plugin.ring.memory import layer_session_bytes, ring_memory

MIB = 2**20
BF16 = torch.bfloat16.itemsize


def test_the_released_model_has_six_global_layers_among_twenty_four() -> None:
    config = ring_config()
    assert [i for i, layer in enumerate(config.layers) if layer == GLOBAL] == [3, 7, 11, 15, 19, 23]
    assert config.layers.count(LOCAL) == 18
    assert (config.num_layers, config.num_qo_heads, config.num_kv_heads) == (24, 32, 16)
    assert config.head_dim == 64


@pytest.mark.parametrize(
    ("resolution", "full", "local", "wide", "session"),
    [
        ("720p", False, 34, 34, 816),
        ("360p", False, 8.5, 8.5, 204),
        ("720p", True, 34, 258, 2160),
        ("360p", True, 8.5, 64.5, 540),
    ],
)
def test_the_memory_of_a_session_is_the_worked_number(
    resolution: str, full: bool, local: float, wide: float, session: float
) -> None:
    config = ring_config(resolution, full_global_ring=full)
    assert layer_session_bytes(config, 0, BF16) == local * MIB
    assert layer_session_bytes(config, 3, BF16) == wide * MIB
    assert ring_memory(config, BF16).session_bytes == session * MIB


def test_four_sessions_take_five_with_the_one_for_padding_rows() -> None:
    memory = ring_memory(ring_config(num_sessions=4), BF16)
    assert memory.total_bytes == 4080 * MIB
    assert str(memory).startswith("4080.0 MiB for 5 sessions")


@pytest.mark.parametrize("resolution", ["720p", "360p"])
def test_the_cache_that_is_built_has_the_predicted_bytes(resolution: str) -> None:
    config = ring_config(resolution)
    for layer in (LOCAL, GLOBAL, FULL_GLOBAL):
        cache = LayerRingCache(
            layer,
            tokens_per_frame=config.tokens_per_frame,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            total_sessions=1,
            dtype=torch.bfloat16,
            device="meta",
        )
        slots = (layer.ring_frames + 1) * config.tokens_per_frame
        assert cache.kv.nbytes == slots * 4096


def test_the_compact_global_ring_sees_the_slots_of_the_full_one() -> None:
    assert (GLOBAL.ring_buckets, GLOBAL.pinned_dilation) == (
        FULL_GLOBAL.ring_buckets,
        FULL_GLOBAL.pinned_dilation,
    )
    assert max(len(visible_slots(frame, 8, 16)) for frame in range(400)) == 16


def test_smaller_models_keep_the_pattern() -> None:
    assert ring_layers(8) == (LOCAL, LOCAL, LOCAL, GLOBAL) * 2
    assert ring_layers(4, full_global_ring=True)[3] == FULL_GLOBAL


def test_an_unknown_resolution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of \['360p', '720p'\], got '1080p'"):
        ring_config("1080p")
