"""The example video model over pages, compared with the same model under an explicit mask."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_plugin.attention.ring_reference import masked_attention
from mstar_plugin.kv.config import KVStep, RetentionPolicy
from mstar_plugin.kv.retention import visible_positions
from mstar_plugin.video import WindowSchedule

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from window_video import (
    CLIP,
    Attend,
    PagedStreams,
    RollingVideo,
    VideoConfig,
    VideoModel,
    video_positions,
)

CONFIG = VideoConfig(denoise_passes=2)
PROMPTS = {"main": [3, 14, 15, 9, 26, 5, 35, 8, 9], "uncond": [0, 1, 2, 3, 4]}
PAGE_SIZE = 16


class MaskedStreams:
    """Every committed key of both branches; what retention hides is masked."""

    def __init__(self, policies: dict[str, RetentionPolicy]) -> None:
        self.policies = policies
        self.kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    @contextmanager
    def running(self, step: KVStep, *, causal: bool) -> Iterator[Attend]:
        assert step.segments is not None
        written: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        spans = [segment.span for segment in step.segments]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [torch.split(x, spans) for x in (q, k, v)]
            outputs = []
            for segment, row_q, row_k, row_v in zip(step.segments or (), *parts, strict=True):
                past = self.kept.get((segment.label, layer), (row_k[:0], row_v[:0]))
                keys, values = torch.cat([past[0], row_k]), torch.cat([past[1], row_v])
                written[segment.label, layer] = keys, values
                mask = self._mask(segment.label, len(past[0]), segment.span, causal)
                by_head = [x.transpose(0, 1) for x in (row_q, keys, values)]
                scale = CONFIG.head_dim**-0.5
                output = masked_attention(by_head[0], by_head[1], by_head[2], mask, scale)
                outputs.append(output.transpose(0, 1))
            return torch.cat(outputs)

        yield attend
        if step.commit:
            self.kept.update(written)

    def _mask(self, label: str, stored: int, span: int, causal: bool) -> Tensor:
        mask = torch.ones(span, stored + span, dtype=torch.bool)
        if causal:
            return mask.tril(diagonal=stored)
        if label in self.policies and stored:
            policy = self.policies[label]
            mask[:, :stored] = False
            for seen in visible_positions(
                stored, policy.context_budget, policy.protected_prefix, PAGE_SIZE
            ):
                mask[:, seen.start : min(seen.stop, stored)] = True
        return mask


def make_video(streams: Any, num_windows: int = 12, context: int = 7) -> RollingVideo:
    torch.manual_seed(0)
    schedule = WindowSchedule(num_windows * 4, 4, context)
    return RollingVideo(VideoModel(CONFIG), streams, schedule, PROMPTS)


def paged() -> PagedStreams:
    return PagedStreams(CONFIG, page_size=PAGE_SIZE, num_pages=64)


@pytest.mark.parametrize("context", [7, 0, 3])
def test_a_rolling_clip_equals_the_one_under_an_explicit_mask(context: int) -> None:
    num_windows = 10 if context else 5
    video = make_video(paged(), num_windows, context)
    policies = {label: layout.retention for label, layout in video.layouts.items()}
    masked = MaskedStreams({label: p for label, p in policies.items() if p is not None})
    reference = make_video(masked, num_windows, context)
    for got, expected in zip(video.windows(), reference.windows(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_the_context_matters_to_the_clip() -> None:
    clips = [torch.cat(list(make_video(paged(), 6, context).windows())) for context in (7, 3)]
    assert torch.equal(clips[0][:4], clips[1][:4])
    assert (clips[0][16:] - clips[1][16:]).abs().max() > 1e-2


def test_live_pages_reach_what_the_layout_promises_and_stay_there() -> None:
    streams = paged()
    video = make_video(streams, num_windows=25)
    caps = {"window": video.schedule.num_windows}
    promised = sum(layout.pages(caps, PAGE_SIZE) for layout in video.layouts.values())
    peaks = []
    for _ in video.windows():
        peaks.append(streams.peak_pages)
        streams.peak_pages = 0
    assert peaks[:2] == [8, 14]
    assert set(peaks[2:]) == {promised}
    streams.manager.assert_pages_conserved()


def test_each_branch_keeps_its_own_prompt() -> None:
    streams = paged()
    video = make_video(streams, num_windows=8)
    prompts: dict[str, Tensor] = {}
    for index, _ in enumerate(video.windows()):
        for label, words in PROMPTS.items():
            k, _ = streams.manager.read_stream(CLIP, label, layer=1)
            prompts.setdefault(label, k[: len(words)])
            assert torch.equal(k[: len(words)], prompts[label])
        released = streams.manager.released_tokens(CLIP, "main")
        assert (released > 0) == (index >= 2)


def test_denoising_keeps_nothing_and_only_the_last_pass_commits() -> None:
    streams = paged()
    video = make_video(streams, num_windows=3)
    span = 4 * CONFIG.unit_tokens
    stored = [
        streams.manager.stored_tokens(CLIP, "uncond")
        + streams.manager.released_tokens(CLIP, "uncond")
        for _ in video.windows()
    ]
    assert stored == [5 + span, 5 + 2 * span, 5 + 3 * span]


def test_a_pool_smaller_than_the_promise_runs_out() -> None:
    streams = PagedStreams(CONFIG, page_size=PAGE_SIZE, num_pages=20)
    with pytest.raises(RuntimeError, match="needs 20 pages at once and the pool has 19"):
        list(make_video(streams, num_windows=5).windows())


def test_a_pool_of_exactly_the_promise_is_enough() -> None:
    streams = PagedStreams(CONFIG, page_size=PAGE_SIZE, num_pages=1 + 20)
    assert len(list(make_video(streams, num_windows=8).windows())) == 8


def test_positions_are_absolute_however_far_the_clip_has_come() -> None:
    early, late = video_positions(range(2), 5, CONFIG), video_positions(range(900, 902), 5, CONFIG)
    assert early.shape == (2 * CONFIG.unit_tokens, 3)
    assert torch.equal(late - early, torch.tensor([900.0, 0, 0]).double().expand_as(early))
    assert early[0].tolist() == [15005, 0, 0]
    assert early[-1].tolist() == [15006, CONFIG.rows - 1, CONFIG.columns - 1]
