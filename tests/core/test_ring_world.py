"""The example world model over ring caches, compared with the same model over everything it saw."""

import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mstar_plugin.attention.ring_reference import ring_attention_reference

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from ball_scene import random_scenes
from frame_world import (
    FrameWorld,
    FrameWorldConfig,
    WorldEngine,
    to_pixels,
    to_tokens,
)
from world_rollout import WEIGHTS, trained_model

SMALL = FrameWorldConfig(grid=2, patch=1, head_dim=8, denoise_passes=1)


class UnboundedPass:
    """Attention over every committed frame of one world, hidden ones masked explicitly."""

    def __init__(self, config: FrameWorldConfig) -> None:
        self.layers = config.ring(num_sessions=1).layers
        self.committed: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.frame = 0
        self.commit = False

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        frames = [*self.committed[layer], (k[0], v[0])]
        if self.commit:
            self.committed[layer] = frames
        keys, values = (torch.stack(x, 1) for x in zip(*frames, strict=True))
        g = self.layers[layer]
        return ring_attention_reference(
            q[0], keys, values, self.frame, g.pinned_dilation, g.ring_buckets
        )[None]


def action(frame: int) -> Tensor:
    return torch.tensor([(-1.0) ** (frame // 7), 0.3 * (frame % 5)])


def engine_of(config: FrameWorldConfig, num_sessions: int) -> WorldEngine:
    torch.manual_seed(0)
    return WorldEngine(FrameWorld(config), num_sessions, path="gather")


@torch.inference_mode()
def unbounded_frame(
    model: FrameWorld, attend: UnboundedPass, noise: Tensor, act: Tensor, commit: Tensor | None
) -> Tensor:
    """The frame denoised from `noise`; what is committed is `commit`, or the frame itself."""
    position, frames = torch.tensor([attend.frame]), noise[None]
    levels = torch.linspace(1, 0, model.config.denoise_passes + 1)
    attend.commit = False
    for level, lower in zip(levels, levels[1:], strict=False):
        predicted = model(frames, level[None], act[None], position, attend)
        frames = predicted + lower / level * (frames - predicted)
    attend.commit = True
    kept = frames if commit is None else commit[None]
    model(kept, levels[-1:], act[None], position, attend)
    attend.frame += 1
    return frames[0]


def test_every_frame_equals_that_of_an_unbounded_cache_with_an_explicit_mask() -> None:
    engine = engine_of(SMALL, num_sessions=1)
    attend = UnboundedPass(SMALL)
    engine.spawn("world", seed=3)
    for frame in range(140):
        noise = engine._noise("world")
        got = engine.advance({"world": action(frame)})["world"]
        expected = unbounded_frame(engine.model, attend, noise, action(frame), commit=got)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_worlds_in_one_batch_at_different_clocks_are_what_they_are_alone() -> None:
    together, alone = engine_of(SMALL, num_sessions=2), engine_of(SMALL, num_sessions=2)
    for engine in (together, alone):
        engine.spawn("early", seed=1)
        engine.spawn("late", seed=2)
    for frame in range(45):
        worlds = ["late", "early"] if frame >= 20 else ["early"]
        actions = {world: action(together.clocks[world]) for world in worlds}
        got = together.advance(actions)
        for world in worlds:
            expected = alone.advance({world: actions[world]})[world]
            torch.testing.assert_close(got[world], expected, atol=2e-4, rtol=1e-3)


def test_a_forked_world_has_its_own_future_and_leaves_the_first_one_alone() -> None:
    engine, undisturbed = engine_of(SMALL, num_sessions=2), engine_of(SMALL, num_sessions=2)
    for each in (engine, undisturbed):
        each.spawn("world", seed=5)
        for frame in range(20):
            each.advance({"world": action(frame)})
    engine.fork("world", "twin")
    same = engine.advance({"world": action(20), "twin": action(20)})
    torch.testing.assert_close(same["world"], same["twin"], atol=1e-5, rtol=1e-4)
    futures = engine.advance({"world": action(21), "twin": -action(21)})
    assert (futures["world"] - futures["twin"]).abs().max() > 1e-3
    undisturbed.advance({"world": action(20)})
    expected = undisturbed.advance({"world": action(21)})["world"]
    torch.testing.assert_close(futures["world"], expected, atol=1e-4, rtol=1e-3)


def test_a_long_rollout_allocates_nothing() -> None:
    engine = engine_of(replace(SMALL, num_layers=1), num_sessions=1)
    engine.spawn("world", seed=0)
    storages = {cache.kv.data_ptr() for cache in engine.manager.layers}
    before = engine.cache_bytes
    for frame in range(300):
        engine.advance({"world": action(frame)})
    assert {cache.kv.data_ptr() for cache in engine.manager.layers} == storages
    assert engine.cache_bytes == before == engine.manager.memory_report().total_bytes
    assert engine.clocks == {"world": 300}


def test_a_world_may_begin_at_a_frame_no_table_would_reach() -> None:
    engine = engine_of(SMALL, num_sessions=1)
    engine.spawn("world", seed=0)
    engine.clocks["world"] = 2**31 + 3000
    frames = [engine.advance({"world": action(frame)})["world"] for frame in range(20)]
    assert torch.stack(frames).isfinite().all()


def test_a_world_beyond_the_sessions_is_refused_and_the_others_go_on() -> None:
    engine, undisturbed = engine_of(SMALL, num_sessions=1), engine_of(SMALL, num_sessions=1)
    for each in (engine, undisturbed):
        each.spawn("world", seed=0)
        each.advance({"world": action(0)})
    engine.spawn("second", seed=1)
    with pytest.raises(RuntimeError, match="num_sessions=1 ring sessions are all taken"):
        engine.advance({"world": action(1), "second": action(0)})
    got = engine.advance({"world": action(1)})["world"]
    assert torch.equal(got, undisturbed.advance({"world": action(1)})["world"])


def test_the_trained_world_follows_the_player_past_the_wrap() -> None:
    config = FrameWorldConfig()
    engine = WorldEngine(trained_model(WEIGHTS), num_sessions=1)
    engine.spawn("world", seed=0)
    scene = random_scenes(1, torch.Generator().manual_seed(5))
    engine.prime({"world": to_tokens(scene.pictures(32), config)[0]})
    for frame in range(1, 24):
        push = torch.tensor([math.cos(frame / 6), math.sin(frame / 6)])
        scene = scene.moved(push[None])
        got = engine.advance({"world": push})["world"]
    expected = to_tokens(scene.pictures(32), config)[0]
    assert (got - expected).abs().mean() < 0.05


def test_pictures_and_tokens_are_inverse() -> None:
    config = FrameWorldConfig()
    pictures = random_scenes(2, torch.Generator().manual_seed(0)).pictures(32)
    frame = to_tokens(pictures, config)[1]
    assert torch.equal(to_pixels(frame, config), ((pictures[1] + 1) * 127.5).byte())


def test_a_frame_becomes_a_picture_patch_by_patch() -> None:
    config = FrameWorldConfig(grid=2, patch=1)
    frame = torch.tensor([[-1.0, -1, -1], [1, 1, 1], [0, 0, 0], [5, -5, 0]])
    pixels = to_pixels(frame, config)
    assert pixels.tolist() == [[[0, 0, 0], [255] * 3], [[127] * 3, [255, 0, 127]]]
