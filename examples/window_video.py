"""A small video model of the Cosmos kind, generated window by window over paged streams.

Each window is denoised behind a text prompt and the latest units of the clip; one more pass commits
it and releases what has left the context. The branches `main` and `uncond` run in one batch for
guidance. Letters: `N` packed tokens of a step, `C` channels per token, `D` head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from mstar_models.cosmos3 import COMBINED_LABELS, LABELS, rolling_layouts, unit_position
from mstar_plugin.attention import AttentionParams, PlannedAttention, plan_attention
from mstar_plugin.kv.config import KVStep, PagedKVConfig, StreamLayout
from mstar_plugin.kv.manager import KVManager
from mstar_plugin.step import Segment, StepContext
from mstar_plugin.video import WindowSchedule

CFG = COMBINED_LABELS[LABELS]
CLIP = "clip"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """Sizes of the model; a latent unit is `rows * columns` tokens."""

    num_layers: int = 2
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rows: int = 3
    columns: int = 4
    channels: int = 8
    vocabulary: int = 64
    denoise_passes: int = 4
    fps: float = 24.0
    guidance: float = 3.0

    @property
    def unit_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def width(self) -> int:
        return self.num_qo_heads * self.head_dim


class Attend(Protocol):
    """Stores the step's keys and values and attends with its queries.

    q: `[N, Q, D]`, k and v: `[N, H, D]`, packed label by label. Returns `[N, Q, D]`.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Streams(Protocol):
    """Where the two branches of a clip keep their KV."""

    def running(self, step: KVStep, *, causal: bool) -> AbstractContextManager[Attend]:
        """The attention of one step; leaving the context commits it."""
        ...


class Block(nn.Module):
    def __init__(self, config: VideoConfig) -> None:
        super().__init__()
        width, kv_width = config.width, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.split = (width, kv_width, kv_width)

    def forward(self, x: Tensor, rotation: Tensor, layer: int, attend: Attend) -> Tensor:
        parts = self.qkv(self.norm(x)).split(self.split, dim=-1)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in parts)
        out = attend(layer, rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(out.flatten(1))
        result: Tensor = x + self.mlp(x)
        return result


class VideoModel(nn.Module):
    """One transformer for prompts and latents, as packed tokens."""

    def __init__(self, config: VideoConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.enter = nn.Linear(config.channels, config.width)
        self.noise = nn.Linear(1, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.leave = nn.Linear(config.width, config.channels)

    def read(self, word_ids: Tensor, positions: Tensor, attend: Attend) -> None:
        """Store prompts: ids int64 `[N]`, positions `[N, 3]`."""
        self._run(self.words(word_ids), positions, attend)

    def flow(self, latents: Tensor, level: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`[N, C]`: the direction from the clip to its noise, for latents `[N, C]` at one noise
        level and positions `[N, 3]`.
        """
        x = self.enter(latents) + self.noise(level.view(1, 1))
        result: Tensor = self.leave(self._run(x, positions, attend))
        return result

    def _run(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rotation = rotations(positions, self.config.head_dim)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, layer, attend)
        return x


def rotations(positions: Tensor, head_dim: int) -> Tensor:
    """complex `[N, 1, D / 2]` of positions float64 `[N, 3]` (time, row, column).

    Half of the pairs turn with time and a quarter each with the row and the column.
    """
    quarter = head_dim // 8
    axis = torch.tensor([0] * 2 * quarter + [1] * quarter + [2] * quarter)
    speeds = 2.0 ** -torch.cat([torch.arange(2 * quarter), *[torch.arange(quarter)] * 2]).double()
    angle = (positions[:, axis] * speeds)[:, None]
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn neighbouring elements of `x` `[N, H, D]` by pairs."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def text_positions(num_tokens: int) -> Tensor:
    """float64 `[num_tokens, 3]`: a word has its index on all three axes."""
    return torch.arange(num_tokens).double()[:, None].expand(-1, 3)


def video_positions(units: range, prompt_tokens: int, config: VideoConfig) -> Tensor:
    """float64 `[len(units) * unit_tokens, 3]` of absolute units, behind a branch's own prompt."""
    times = [unit_position(unit, prompt_tokens, config.fps) for unit in units]
    axes = (torch.tensor(times).double(), torch.arange(config.rows), torch.arange(config.columns))
    grid = torch.meshgrid(*(axis.double() for axis in axes), indexing="ij")
    return torch.stack(grid, dim=-1).view(-1, 3)


class PagedStreams:
    """The branches of one clip in the pages of a `KVManager`."""

    def __init__(self, config: VideoConfig, *, page_size: int, num_pages: int) -> None:
        self.kv = PagedKVConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_qo_heads=config.num_qo_heads,
            max_seq_len=num_pages * page_size,
            max_num_pages=num_pages,
            page_size=page_size,
            prefix_cache=False,
        )
        self.manager = KVManager(self.kv)
        self.manager.ingest_request(CLIP)
        self.peak_pages = 0

    @property
    def live_pages(self) -> int:
        """Pages both branches hold now."""
        return self.kv.max_num_pages - 1 - self.manager.num_free_pages

    @contextmanager
    def running(self, step: KVStep, *, causal: bool) -> Iterator[Attend]:
        """One admitted, planned and then committed step; RuntimeError when pages run out."""
        ctx = StepContext(request_ids=[CLIP])
        outcome = self.manager.admit(step, ctx)
        if outcome.reason is not None:
            raise RuntimeError(outcome.reason.message)
        self.peak_pages = max(self.peak_pages, self.live_pages)
        plan = self.manager.plan(step, ctx)[CFG]
        params = AttentionParams.from_config(self.kv, causal=causal)
        yield PagedPass(self.manager, plan_attention(plan, params, "cpu"))
        self.manager.commit(step, ctx)


@dataclass(frozen=True, slots=True)
class PagedPass:
    """Attention of one planned step over pages."""

    manager: KVManager
    attention: PlannedAttention

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.manager.write_kv(k, v, layer=layer, label=CFG)
        return self.attention.run(q, self.manager.layer_view(layer)).output


@dataclass
class RollingVideo:
    """Generates a clip window by window. `prompts`: word ids of each branch."""

    model: VideoModel
    streams: Streams
    schedule: WindowSchedule
    prompts: Mapping[str, Sequence[int]]
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def layouts(self) -> dict[str, StreamLayout]:
        """What each branch will hold, from which its pages follow."""
        lengths = {label: len(words) for label, words in self.prompts.items()}
        return rolling_layouts(lengths, self.schedule, self.model.config.unit_tokens)

    @torch.inference_mode()
    def windows(self) -> Iterator[Tensor]:
        """The clip's windows in order, `[units, unit_tokens, C]` each."""
        self._read_prompts()
        for index in range(self.schedule.num_windows):
            yield self._window(self.schedule.units(index))

    def _read_prompts(self) -> None:
        words = torch.tensor([word for label in LABELS for word in self.prompts[label]])
        positions = torch.cat([text_positions(len(self.prompts[label])) for label in LABELS])
        step = self._step({label: len(self.prompts[label]) for label in LABELS})
        with self.streams.running(step, causal=True) as attend:
            self.model.read(words, positions, attend)

    def _window(self, units: range) -> Tensor:
        config = self.model.config
        num_tokens = len(units) * config.unit_tokens
        latents = torch.randn(num_tokens, config.channels, generator=self._generator)
        positions = torch.cat(
            [video_positions(units, len(self.prompts[label]), config) for label in LABELS]
        )
        spans = dict.fromkeys(LABELS, num_tokens)
        levels = torch.linspace(1, 0, config.denoise_passes + 1)
        for level, lower in zip(levels, levels[1:], strict=False):
            flow = self._flow(self._step(spans, commit=False), latents, level, positions)
            latents = latents - (level - lower) * flow
        self._flow(self._committing_step(spans), latents, levels[-1], positions)
        return latents.view(len(units), config.unit_tokens, config.channels)

    def _flow(self, step: KVStep, latents: Tensor, level: Tensor, positions: Tensor) -> Tensor:
        with self.streams.running(step, causal=False) as attend:
            both = self.model.flow(latents.repeat(len(LABELS), 1), level, positions, attend)
        guided, free = both.chunk(len(LABELS))
        return free + self.model.config.guidance * (guided - free)

    def _step(self, spans: Mapping[str, int], *, commit: bool = True) -> KVStep:
        segments = tuple(Segment(CLIP, label, span) for label, span in spans.items())
        return KVStep(segments=segments, commit=commit, combined_labels=COMBINED_LABELS)

    def _committing_step(self, spans: Mapping[str, int]) -> KVStep:
        policies = {(CLIP, label): layout.retention for label, layout in self.layouts.items()}
        kept = {stream: policy for stream, policy in policies.items() if policy is not None}
        return replace(self._step(spans), retention=kept)
