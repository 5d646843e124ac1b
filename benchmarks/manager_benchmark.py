"""What the KV manager's bookkeeping costs per step: admit, plan and commit, without any forward.

    OMP_NUM_THREADS=1 python benchmarks/manager_benchmark.py --out benchmarks/results/manager.md

Decode steps run one after the other, so pages fill up and new ones are taken as in service. CPU
time of the thread is given beside wall time: the first does not depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from mstar_plugin import (
    KVReqConfig,
    KVStep,
    PagedKVConfig,
    RetentionPolicy,
    Segment,
    StepContext,
)
from mstar_plugin.kv.chain import prompt_keys
from mstar_plugin.kv.manager import KVManager

ROWS, PAGES, PAGE_SIZE = 128, 32, 128
TARGET_US = 300.0
PHASES = ("admit", "plan", "commit")
MakeStep = Callable[[], tuple[KVStep, StepContext]]


@dataclass(frozen=True, slots=True)
class Result:
    """Microseconds of each phase and of all three together, one entry per step."""

    name: str
    phases: Mapping[str, Sequence[float]]
    total: Sequence[float]


def manager_of(labels: Sequence[str], prompt: int, config: KVReqConfig | None) -> KVManager:
    """`ROWS` requests whose streams hold `prompt` tokens, give or take half a page."""
    num_pages = 1 + len(labels) * ROWS * (PAGES + 34)
    shape = PagedKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        max_seq_len=1 << 20,
        max_num_pages=num_pages,
        page_size=PAGE_SIZE,
    )
    manager = KVManager(shape)
    for row in range(ROWS):
        manager.ingest_request(name(row), config)
        length = max(0, prompt - 37 * row % PAGE_SIZE) if prompt else 0
        segments = tuple(Segment(name(row), label, length) for label in labels)
        run(manager, KVStep(segments), StepContext(request_ids=(name(row),)))
    return manager


def name(row: int) -> str:
    return f"request-{row}"


def run(manager: KVManager, step: KVStep, ctx: StepContext) -> list[float]:
    """Microseconds of each phase of one step."""
    times = [time.perf_counter()]
    for phase in (manager.admit, manager.plan, manager.commit):
        outcome = phase(step, ctx)
        if outcome is not None and getattr(outcome, "reason", None):
            raise RuntimeError(f"the benchmark's step was refused: {outcome}")
        times.append(time.perf_counter())
    return [(after - before) * 1e6 for before, after in zip(times, times[1:], strict=False)]


def measure(title: str, manager: KVManager, make_step: MakeStep, repeats: int) -> Result:
    samples = [run(manager, *make_step()) for _ in range(repeats)]
    manager.assert_pages_conserved()
    by_phase = dict(zip(PHASES, zip(*samples, strict=True), strict=True))
    return Result(title, by_phase, [sum(sample) for sample in samples])


def tenth(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def step_maker(labels: Sequence[str], span: int, **declared: Any) -> MakeStep:
    """A new step object per step, as an engine makes them."""
    ids = tuple(name(row) for row in range(ROWS))

    def make() -> tuple[KVStep, StepContext]:
        segments = tuple(Segment(request, label, span) for request in ids for label in labels)
        return KVStep(segments, **declared), StepContext(request_ids=ids)

    return make


def results(repeats: int) -> list[Result]:
    prompt = PAGES * PAGE_SIZE - 64
    main, both = ("main",), ("main", "uncond")
    keys, tail, _ = prompt_keys(list(range(PAGE_SIZE)), PAGE_SIZE)
    keyed = KVReqConfig(
        prefix_keys={"main": keys}, prefix_tail={"main": tail}, prefix_decode={"main": "ids"}
    )
    policies = {(name(row), "main"): RetentionPolicy(2048, 64) for row in range(ROWS)}
    rows = f"{ROWS} decode rows of {PAGES} pages"
    return [
        measure(rows, manager_of(main, prompt, None), step_maker(main, 1), repeats),
        measure(
            f"{rows}, with prefix keys",
            manager_of(main, prompt, keyed),
            step_maker(main, 1),
            repeats,
        ),
        measure(
            f"{ROWS} decode rows with a retention policy of 2048 tokens",
            manager_of(main, 2112, None),
            step_maker(main, 1, retention=policies),
            repeats,
        ),
        measure(
            f"{rows} in each of two combined labels",
            manager_of(both, prompt, None),
            step_maker(both, 1, combined_labels={both: "_cfg"}),
            repeats,
        ),
        measure(
            f"{ROWS} prefill rows of 64 tokens",
            manager_of(main, 0, None),
            step_maker(main, 64),
            min(repeats, 60),
        ),
    ]


def report(measured: Sequence[Result], repeats: int) -> str:
    lines = [
        "# What a step costs the KV manager on the host",
        "",
        f"Wall time of {repeats} steps one after the other (prefill: at most 60), microseconds: "
        f"median / tenth percentile. Pages of {PAGE_SIZE} tokens; no forward, CPU tensors.",
        f"Target for the first row: {TARGET_US:.0f} microseconds in all.",
        "",
        f"CPU: {processor()}. Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}.",
        f"Load average while measuring: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
        "Command: `OMP_NUM_THREADS=1 python benchmarks/manager_benchmark.py "
        "--out benchmarks/results/manager.md`",
        "",
        "| step | admit | plan | commit | all |",
        "|---|---|---|---|---|",
    ]
    for result in measured:
        columns = [*(result.phases[phase] for phase in PHASES), result.total]
        cells = [f"{statistics.median(values):.0f} / {tenth(values):.0f}" for values in columns]
        lines.append(f"| {' | '.join([result.name, *cells])} |")
    return "\n".join(lines) + "\n"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = results(options.repeats)
    text = report(measured, options.repeats)
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if tenth(measured[0].total) <= TARGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
