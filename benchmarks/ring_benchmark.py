"""One frame of a layer over a ring, over an unbounded cache, and over a window made with torch.cat.

    python benchmarks/ring_benchmark.py --out benchmarks/results/ring.md

All sides store the frame's keys and values and attend with its queries; they take turns within one
run. The ring and the window see the last 16 frames, the unbounded cache sees all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar_models.waypoint import LOCAL
from mstar_plugin.attention.flex import RingPath, can_compile, ring_attention
from mstar_plugin.kv.config import RingKVConfig, RingKVStep
from mstar_plugin.ring.manager import RingKVManager
from mstar_plugin.step import StepContext

FRAMES = (8, 16, 32, 64, 128)
TOKENS, QO_HEADS, KV_HEADS, HEAD_DIM = 128, 8, 4, 64
RING = "ring, gather"
Side = Callable[[], Tensor]
Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Frame:
    """q: `[1, Q, T, D]`; k, v: `[1, H, T, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_frame() -> Frame:
    shapes = [(1, heads, TOKENS, HEAD_DIM) for heads in (QO_HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    return Frame(q, k, v)


def make_manager() -> RingKVManager:
    config = RingKVConfig(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_qo_heads=QO_HEADS,
        tokens_per_frame=TOKENS,
        layers=(LOCAL,),
    )
    return RingKVManager(config)


def ring_side(history: list[Frame], path: RingPath) -> Side:
    """The last frame of `history` over a ring that holds those before it."""
    manager = make_manager()
    manager.ingest_request("world")
    cache, ctx = manager.layers[0], StepContext(request_ids=["world"])
    for clock, frame in enumerate(history):
        step = RingKVStep(frames=(("world", clock),))
        manager.admit(step, ctx)
        plan = manager.plan(step, ctx)
        if frame is not history[-1]:
            cache.upsert(frame.k, frame.v, plan.session_idx, plan.frame_pos, commit=True)
            manager.commit(step, ctx)
    last = history[-1]

    def run() -> Tensor:
        cache.upsert(last.k, last.v, plan.session_idx, plan.frame_pos, commit=True)
        return ring_attention(last.q, cache, plan.tables[0], path=path)

    return run


def unbounded_side(history: list[Frame]) -> Side:
    """The last frame over a preallocated cache of all frames: no copy, ever more keys."""
    last, end = history[-1], len(history) * TOKENS
    keys = torch.cat([frame.k for frame in history], dim=2)
    values = torch.cat([frame.v for frame in history], dim=2)

    def run() -> Tensor:
        keys[:, :, end - TOKENS :] = last.k
        values[:, :, end - TOKENS :] = last.v
        return F.scaled_dot_product_attention(last.q, keys, values, enable_gqa=True)

    return run


def window_side(history: list[Frame]) -> Side:
    """The last frame over the window, made anew from the list of its frames."""
    window = history[-LOCAL.ring_buckets :]
    last = history[-1]

    def run() -> Tensor:
        keys = torch.cat([frame.k for frame in window], dim=2)
        values = torch.cat([frame.v for frame in window], dim=2)
        return F.scaled_dot_product_attention(last.q, keys, values, enable_gqa=True)

    return run


def sides_at(num_frames: int) -> dict[str, Side]:
    history = [random_frame() for _ in range(num_frames)]
    sides = {
        RING: ring_side(history, "gather"),
        "unbounded": unbounded_side(history),
        "torch.cat": window_side(history),
    }
    if can_compile("cpu"):
        sides["ring, flex"] = ring_side(history, "flex")
    return sides


def check(sides: dict[str, Side]) -> None:
    """The sides that see the same frames give the same answer."""
    expected = sides["torch.cat"]()
    for name in sides.keys() - {"unbounded"}:
        torch.testing.assert_close(sides[name](), expected, atol=1e-4, rtol=1e-3)


def alternating_milliseconds(sides: Mapping[Key, Side], rounds: int) -> dict[Key, list[float]]:
    """Every side at every number of frames once a round, so that all see the same machine."""
    times: dict[Key, list[float]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, side in sides.items():
            started = time.perf_counter()
            side()
            times[key].append(1000 * (time.perf_counter() - started))
    return times


def cell(milliseconds: list[float]) -> str:
    """Median and the middle half of the runs."""
    low, median, high = statistics.quantiles(milliseconds, n=4)
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def paired_ratio(times: Mapping[Key, list[float]], slow: Key, fast: Key) -> float:
    """Median over the rounds of how many times longer `slow` took in the same round."""
    return statistics.median(s / f for s, f in zip(times[slow], times[fast], strict=True))


def table(times: Mapping[Key, list[float]]) -> str:
    names = [name for frames, name in times if frames == FRAMES[0]]
    compared = [name for name in names if name != RING]
    head = ["frames", *(f"{name} (ms)" for name in names), *(f"{n} / {RING}" for n in compared)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for frames in FRAMES:
        cells = [str(frames), *(cell(times[frames, name]) for name in names)]
        cells += [f"{paired_ratio(times, (frames, n), (frames, RING)):.2f}" for n in compared]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(times: Mapping[Key, list[float]]) -> str:
    """How much longer each side takes at the most frames than where the window is first full."""
    names = [name for frames, name in times if frames == FRAMES[0]]
    first, last = LOCAL.ring_buckets, max(FRAMES)
    parts = (f"{name} {paired_ratio(times, (last, name), (first, name)):.2f}" for name in names)
    return ", ".join(parts)


def memory() -> str:
    manager = make_manager()
    formula = (LOCAL.ring_frames + 1) * TOKENS * 2 * KV_HEADS * HEAD_DIM * 4
    allocated = manager.layers[0].kv.nbytes // manager.config.total_sessions
    assert manager.memory_report().session_bytes == formula == allocated
    return (
        f"Bytes per session and layer: {allocated} allocated, "
        f"(16 + 1) * {TOKENS} * 2 * {KV_HEADS} * {HEAD_DIM} * 4 = {formula}."
    )


def report(times: Mapping[Key, list[float]], rounds: int) -> str:
    return f"""# One frame over a ring

One layer, {TOKENS} tokens a frame, {QO_HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}, float32,
{torch.get_num_threads()} thread, torch {torch.__version__}. Store the frame and attend with it;
median and middle half of {rounds} rounds, in each of which every cell is measured once. Ring and
window see 16 frames. "gather" is the ring's path on a CPU, "flex" the compiled kernel made for
GPUs. Ratios are medians over the rounds; on a machine with other work on it only they mean
something. Made by `python benchmarks/ring_benchmark.py --out benchmarks/results/ring.md`.

{table(times)}

Time at {max(FRAMES)} frames over time at {LOCAL.ring_buckets}: {growth(times)}.

{memory()}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sides: dict[Key, Side] = {}
    for frames in FRAMES:
        at_frames = sides_at(frames)
        check(at_frames)
        sides |= {(frames, name): side for name, side in at_frames.items()}
    alternating_milliseconds(sides, rounds=2)
    text = report(alternating_milliseconds(sides, arguments.rounds), arguments.rounds)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
