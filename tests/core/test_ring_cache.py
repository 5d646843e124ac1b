from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_plugin.kv.config import RingKVLayerConfig
from mstar_plugin.ring.cache import LayerRingCache
from mstar_plugin.ring.geometry import slot, visible_slots

T, H, D = 4, 2, 8


def make_cache(
    ring_frames: int = 4, buckets: int = 4, dilation: int = 1, sessions: int = 3
) -> LayerRingCache:
    return LayerRingCache(
        RingKVLayerConfig(ring_frames, buckets, dilation),
        tokens_per_frame=T,
        num_kv_heads=H,
        head_dim=D,
        total_sessions=sessions,
        block_tokens=T,
    )


def rows(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def write(cache: LayerRingCache, session: int, frame: int, value: float, commit: bool) -> None:
    kv = torch.full((1, H, T, D), value)
    cache.upsert(kv, -kv, rows(session), rows(frame), commit=commit)


def stored(cache: LayerRingCache, session: int) -> list[float]:
    """The first key element of each of a session's places, its scratch frame last."""
    per_session = cache.frames_per_session
    places: list[float] = cache.frames[0, 0, :, 0, 0].tolist()
    return places[session * per_session : (session + 1) * per_session]


def test_storage_has_a_scratch_frame_per_session_that_is_always_readable() -> None:
    cache = make_cache(ring_frames=4, sessions=3)
    assert cache.kv.shape == (2, 1, H, 3 * 5 * T, D)
    assert cache.written.view(3, 5, T)[:, :4].any().item() is False
    assert cache.written.view(3, 5, T)[:, 4].all().item() is True


def test_an_uncommitted_pass_touches_the_scratch_frame_only() -> None:
    cache = make_cache()
    write(cache, session=1, frame=0, value=7.0, commit=False)
    assert stored(cache, 1) == [0, 0, 0, 0, 7]
    assert cache.written_slots(1) == [False] * 4
    assert stored(cache, 0) == stored(cache, 2) == [0] * 5


def test_a_committing_pass_keeps_the_frame_in_its_slot_and_in_scratch() -> None:
    cache = make_cache()
    for frame in range(6):
        write(cache, session=1, frame=frame, value=10.0 + frame, commit=True)
    assert stored(cache, 1) == [14, 15, 12, 13, 15]
    assert cache.keys[0, 0, :, 0].tolist() == (-cache.values[0, 0, :, 0]).tolist()


def test_a_dilated_layer_keeps_every_dth_frame_only() -> None:
    cache = make_cache(dilation=3)
    for frame in range(8):
        write(cache, session=0, frame=frame, value=10.0 + frame, commit=True)
    assert stored(cache, 0) == [10, 13, 16, 0, 17]


def test_slots_beyond_the_buckets_are_never_written() -> None:
    cache = make_cache(ring_frames=6, buckets=2)
    for frame in range(9):
        write(cache, session=0, frame=frame, value=1.0 + frame, commit=True)
    assert stored(cache, 0) == [9, 8, 0, 0, 0, 0, 9]


def test_rows_of_one_batch_write_to_their_own_session_and_clock() -> None:
    cache = make_cache()
    k = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, H, T, D)
    cache.upsert(k, k, rows(2, 0), rows(5, 2), commit=True)
    assert stored(cache, 2) == [0, 1, 0, 0, 1]
    assert stored(cache, 0) == [0, 0, 2, 0, 2]
    assert stored(cache, 1) == [0] * 5


@pytest.mark.parametrize("frame", [2**31 - 1, 2**31, 2**40 + 8, 2**62 + 3])
@pytest.mark.parametrize("dilation", [1, 8])
def test_clocks_beyond_32_bits_write_to_the_slot_the_arithmetic_names(
    frame: int, dilation: int
) -> None:
    cache = make_cache(dilation=dilation)
    write(cache, session=1, frame=frame, value=5.0, commit=True)
    is_kept = frame % dilation == 0
    expected = [slot(frame, dilation, 4)] if is_kept else []
    assert [i for i, is_written in enumerate(cache.written_slots(1)) if is_written] == expected
    assert cache.visible(rows(1), rows(frame + 1)).sum().item() == T * (1 + len(expected))


@pytest.mark.parametrize("dilation", [1, 3])
def test_visibility_on_the_device_follows_the_closed_form(dilation: int) -> None:
    cache = make_cache(dilation=dilation)
    for frame in range(4 * 4 * dilation):
        seen = cache.visible(rows(1), rows(frame))[0].view(3, 5, T)
        write(cache, session=1, frame=frame, value=1.0, commit=True)
        again = cache.visible(rows(1), rows(frame))[0].view(3, 5, T)
        assert torch.equal(seen, again)
        expected = [*visible_slots(frame, dilation, 4), 4]
        assert seen[1].all(1).nonzero()[:, 0].tolist() == expected
        assert seen[0].any().item() is seen[2].any().item() is False


def test_reset_forgets_one_session_and_leaves_the_others() -> None:
    cache = make_cache()
    for session in range(3):
        write(cache, session, frame=0, value=1.0 + session, commit=True)
    cache.reset(1)
    assert stored(cache, 1) == [0] * 5
    assert cache.written_slots(1) == [False] * 4
    assert cache.visible(rows(1), rows(0)).sum().item() == T
    assert (stored(cache, 0)[0], stored(cache, 2)[0]) == (1, 3)


def test_a_state_is_a_copy_that_restores_the_ring() -> None:
    cache = make_cache()
    for frame in range(3):
        write(cache, session=0, frame=frame, value=1.0 + frame, commit=True)
    state = cache.get_state(0)
    write(cache, session=0, frame=3, value=9.0, commit=True)
    cache.load_state(2, state)
    assert stored(cache, 2)[:4] == [1, 2, 3, 0]
    assert cache.written_slots(2) == [True, True, True, False]
    assert stored(cache, 0)[:4] == [1, 2, 3, 9]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("kv", torch.zeros(2, H, 3 * T, D), r"kv must be .* of shape \[2, 2, 16, 8\]"),
        ("kv", torch.zeros(2, H, 4 * T, D, dtype=torch.float16), "got torch.float16"),
        ("written", torch.zeros(4 * T), "written must be torch.bool"),
    ],
)
def test_a_state_of_another_shape_or_type_is_refused(name: str, bad: Tensor, message: str) -> None:
    cache = make_cache()
    state = cache.get_state(0)
    state[name] = bad  # type: ignore[literal-required]
    with pytest.raises(ValueError, match=message):
        cache.check_state(state)


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (RingKVLayerConfig(4, 4, 0), {}, "pinned_dilation must be at least 1, got 0"),
        (RingKVLayerConfig(4, 5, 1), {}, r"ring_buckets must lie in 1..ring_frames=4, got 5"),
        (RingKVLayerConfig(4, 0, 1), {}, "ring_buckets must lie in"),
        (RingKVLayerConfig(4, 4, 1), {"total_sessions": 0}, "total_sessions must be at least 1"),
        (RingKVLayerConfig(4, 4, 1), {"tokens_per_frame": 100}, "multiple of block_tokens=128"),
        (RingKVLayerConfig(4, 4, 1), {"tokens_per_frame": 0}, "multiple of block_tokens=128"),
    ],
)
def test_a_geometry_that_cannot_work_is_refused(
    layer: RingKVLayerConfig, changes: dict[str, int], message: str
) -> None:
    sizes: dict[str, Any] = {
        "tokens_per_frame": 128,
        "num_kv_heads": H,
        "head_dim": D,
        "total_sessions": 2,
    }
    with pytest.raises(ValueError, match=message):
        LayerRingCache(layer, **{**sizes, **changes})


@pytest.mark.parametrize(
    ("k", "session_idx", "message"),
    [
        (torch.zeros(1, H, T - 1, D), rows(0), r"k must be .* of shape \[1, 2, 4, 8\]"),
        (torch.zeros(2, H, T, D), rows(0), r"got torch.float32 of shape \[2, 2, 4, 8\]"),
        (torch.zeros(1, H, T, D).bfloat16(), rows(0), "got torch.bfloat16"),
        (torch.zeros(1, H, T, D), rows(0).int(), "session_idx must be torch.int64"),
    ],
)
def test_a_write_that_is_not_one_frame_per_row_is_refused(
    k: Tensor, session_idx: Tensor, message: str
) -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match=message):
        cache.upsert(k, k, session_idx, rows(0), commit=True)
    assert not cache.kv.any()
