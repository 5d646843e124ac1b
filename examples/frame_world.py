"""A small frame world model: a transformer that denoises one frame at a time over ring caches.

Shaped like Waypoint: layers of 16 consecutive frames, every fourth layer 16 frames 8 apart.
Letters: `B` rows, `T` tokens per frame, `C` channels per token, `D` head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mstar_models.waypoint import ring_layers
from mstar_plugin.attention.flex import RingPath, ring_attention
from mstar_plugin.kv.config import RingKVConfig, RingKVStep
from mstar_plugin.ring.manager import RingKVManager
from mstar_plugin.ring.plan import RingPlan
from mstar_plugin.step import StepContext

NUM_ACTIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameWorldConfig:
    """Sizes of the model; a frame is `grid * grid` tokens, each a patch of `patch * patch` RGB
    pixels.
    """

    num_layers: int = 4
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    grid: int = 8
    patch: int = 4
    denoise_passes: int = 4

    @property
    def tokens_per_frame(self) -> int:
        return self.grid * self.grid

    @property
    def channels(self) -> int:
        return 3 * self.patch * self.patch

    @property
    def width(self) -> int:
        return self.num_qo_heads * self.head_dim

    def ring(self, num_sessions: int) -> RingKVConfig:
        """The model's ring cache."""
        return RingKVConfig(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_qo_heads=self.num_qo_heads,
            tokens_per_frame=self.tokens_per_frame,
            layers=ring_layers(self.num_layers),
            num_sessions=num_sessions,
        )


class FrameAttention(Protocol):
    """Where a layer's keys and values go and what its queries see; everything else is the model.

    q: `[B, Q, T, D]`, k and v: `[B, H, T, D]`, the frames of one pass. Returns `[B, Q, T, D]`.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Block(nn.Module):
    def __init__(self, config: FrameWorldConfig) -> None:
        super().__init__()
        width, kv_width = config.width, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.split = (width, kv_width, kv_width)

    def forward(self, x: Tensor, rotation: Tensor, layer: int, attend: FrameAttention) -> Tensor:
        parts = self.qkv(self.norm(x)).split(self.split, dim=-1)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in parts)
        out = attend(layer, rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(x)
        return result


class FrameWorld(nn.Module):
    """Predicts a frame from its noisy version, given the noise level, an action and a clock."""

    def __init__(self, config: FrameWorldConfig) -> None:
        super().__init__()
        self.config = config
        self.enter = nn.Linear(config.channels, config.width)
        self.condition = nn.Sequential(
            nn.Linear(1 + NUM_ACTIONS, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
        )
        self.place = nn.Parameter(torch.randn(config.tokens_per_frame, config.width) * 0.3)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.leave = nn.Sequential(
            nn.RMSNorm(config.width), nn.Linear(config.width, config.channels)
        )

    def forward(
        self,
        frames: Tensor,
        noise_level: Tensor,
        actions: Tensor,
        frame_pos: Tensor,
        attend: FrameAttention,
    ) -> Tensor:
        """frames: `[B, T, C]`; noise_level: `[B]` in 0..1; actions: `[B, 2]`; frame_pos: int64
        `[B]`. Returns `[B, T, C]`.
        """
        condition = self.condition(torch.cat([noise_level[:, None], actions], dim=1))
        x = self.enter(frames) + self.place + condition[:, None]
        rotation = rotations(frame_pos, self.config)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, layer, attend)
        predicted: Tensor = self.leave(x)
        return predicted


def rotations(frame_pos: Tensor, config: FrameWorldConfig) -> Tensor:
    """complex `[B, 1, T, D / 2]`: half of the pairs turn with time, a quarter each with y and x.

    Computed from the clock in every pass, so that no table ends before the world does.
    """
    quarter, device = config.head_dim // 8, frame_pos.device
    speeds = 2.0 ** -torch.arange(2 * quarter, device=device)
    token = torch.arange(config.tokens_per_frame, device=device)
    time = frame_pos[:, None, None].double() * speeds.double()
    time = time.expand(-1, config.tokens_per_frame, -1)
    across = [
        axis[:, None] * speeds[:quarter] for axis in (token // config.grid, token % config.grid)
    ]
    space = torch.cat(across, dim=-1).expand(len(frame_pos), -1, -1)
    angle = torch.cat([time, space.double()], dim=-1)[:, None]
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn neighbouring elements of `x` `[B, H, T, D]` by pairs."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPass:
    """One pass over ring caches."""

    manager: RingKVManager
    plan: RingPlan
    commit: bool
    path: RingPath | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, plan = self.manager.layers[layer], self.plan
        cache.upsert(k, v, plan.session_idx, plan.frame_pos, commit=self.commit)
        return ring_attention(q, cache, plan.tables[layer], path=self.path)


class WorldEngine:
    """Rolls worlds out, one frame of each in a batch."""

    def __init__(
        self, model: FrameWorld, num_sessions: int, *, path: RingPath | None = None
    ) -> None:
        config = model.config
        self.model = model
        self.manager = RingKVManager(
            config.ring(num_sessions), block_tokens=config.tokens_per_frame
        )
        self.clocks: dict[str, int] = {}
        self._seeds: dict[str, int] = {}
        self._path = path

    @property
    def cache_bytes(self) -> int:
        """Bytes of all ring caches."""
        return sum(cache.kv.nbytes for cache in self.manager.layers)

    def spawn(self, world: str, seed: int) -> None:
        """Start a world at frame 0; `seed` decides its noise."""
        self.manager.ingest_request(world)
        self.clocks[world], self._seeds[world] = 0, seed

    def fork(self, world: str, twin: str) -> None:
        """Let `twin` go on from where `world` is now, with the same noise to come."""
        self.spawn(twin, self._seeds[world])
        self.manager.load_state(twin, self.manager.get_state(world))
        self.clocks[twin] = self.clocks[world]

    @torch.inference_mode()
    def advance(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The next frame `[T, C]` of each world in `actions`, in one batch."""
        config = self.model.config
        frames = torch.stack([self._noise(world) for world in actions])
        step, ctx, plan = self._plan(actions)
        action = torch.stack(list(actions.values()))
        levels = torch.linspace(1, 0, config.denoise_passes + 1)
        for level, lower in zip(levels, levels[1:], strict=False):
            predicted = self._run(frames, level, action, plan, commit=False)
            frames = predicted + lower / level * (frames - predicted)
        self._run(frames, levels[-1], action, plan, commit=True)
        self._finish(step, ctx)
        return dict(zip(actions, frames, strict=True))

    @torch.inference_mode()
    def prime(self, frames: Mapping[str, Tensor]) -> None:
        """Commit given frames `[T, C]` as they are, such as the picture a world starts from."""
        step, ctx, plan = self._plan(frames)
        action = torch.zeros(len(frames), NUM_ACTIONS)
        batch = torch.stack(list(frames.values()))
        self._run(batch, torch.tensor(0.0), action, plan, commit=True)
        self._finish(step, ctx)

    def _plan(self, worlds: Mapping[str, Tensor]) -> tuple[RingKVStep, StepContext, RingPlan]:
        step = RingKVStep(frames=tuple((world, self.clocks[world]) for world in worlds))
        ctx = StepContext(request_ids=list(worlds))
        outcome = self.manager.admit(step, ctx)
        if outcome.reason is not None:
            raise RuntimeError(outcome.reason.message)
        return step, ctx, self.manager.plan(step, ctx)

    def _run(
        self, frames: Tensor, level: Tensor, action: Tensor, plan: RingPlan, *, commit: bool
    ) -> Tensor:
        attend = RingPass(manager=self.manager, plan=plan, commit=commit, path=self._path)
        levels = level.expand(len(frames))
        predicted: Tensor = self.model(frames, levels, action, plan.frame_pos, attend)
        return predicted

    def _finish(self, step: RingKVStep, ctx: StepContext) -> None:
        self.manager.commit(step, ctx)
        for world in ctx.request_ids:
            self.clocks[world] += 1

    def _noise(self, world: str) -> Tensor:
        config = self.model.config
        generator = torch.Generator().manual_seed(
            self._seeds[world] * 1_000_003 + self.clocks[world]
        )
        return torch.randn(config.tokens_per_frame, config.channels, generator=generator)


def to_pixels(frame: Tensor, config: FrameWorldConfig) -> Tensor:
    """uint8 RGB `[grid * patch, grid * patch, 3]` of a frame `[T, C]` with values in -1..1."""
    grid, patch = config.grid, config.patch
    image = frame.view(grid, grid, patch, patch, 3).transpose(1, 2)
    return ((image.reshape(grid * patch, grid * patch, 3).clamp(-1, 1) + 1) * 127.5).byte()


def to_tokens(images: Tensor, config: FrameWorldConfig) -> Tensor:
    """`[..., T, C]` of RGB images `[..., grid * patch, grid * patch, 3]`, the inverse of pixels."""
    *leading, _, _, _ = images.shape
    grid, patch = config.grid, config.patch
    patches = images.reshape(*leading, grid, patch, grid, patch, 3).transpose(-4, -3)
    return patches.reshape(*leading, grid * grid, config.channels)
