"""Time of planning a step on the host: index arrays, row lengths, and a KVManager's whole step.

    python benchmarks/plan_benchmark.py [--output benchmarks/results/plan.md]

Each number is the best of several thousand repetitions on one thread, because other programs can
only add to it. FlashInfer and a GPU are not involved.
"""

from __future__ import annotations

import argparse
import platform
import random
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mstar_plugin.kv.config import KVStep, PagedKVConfig
from mstar_plugin.kv.manager import KVManager
from mstar_plugin.kv.plan import (
    PageIndices,
    PinnedIndexRing,
    SequenceView,
    build_paged_indptrs,
)
from mstar_plugin.step import Segment, StepContext

ROWS, PAGES, PAGE_SIZE = 128, 32, 128
REPETITIONS = 3000


def best_microseconds(call: Callable[[], object], number: int = 3) -> float:
    return min(timeit.repeat(call, number=number, repeat=REPETITIONS)) / number * 1e6


def decode_views(make: type[list[int]]) -> list[SequenceView]:
    random.seed(0)
    length = (PAGES - 1) * PAGE_SIZE
    return [
        SequenceView(
            f"r{row}", "main", make(random.sample(range(1, 20000), PAGES)), length + row, 1
        )
        for row in range(1, ROWS + 1)
    ]


def manager_step() -> Callable[[], object]:
    """A committed decode step of `ROWS` rows behind prompts that fill `PAGES - 1` pages."""
    config = PagedKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        max_seq_len=1 << 30,
        max_num_pages=ROWS * (PAGES + 200),
        page_size=PAGE_SIZE,
        prefix_cache=False,
    )
    manager = KVManager(config)
    names = [f"r{row}" for row in range(ROWS)]
    ctx = StepContext(request_ids=names)
    for name in names:
        manager.ingest_request(name)

    def run(span: int) -> None:
        step = KVStep(tuple(Segment(name, "main", span) for name in names))
        assert manager.admit(step, ctx).ok
        manager.plan(step, ctx)
        manager.commit(step, ctx)

    run((PAGES - 1) * PAGE_SIZE)
    return lambda: run(1)


def measure() -> list[tuple[str, float, str]]:
    lists, packed = decode_views(list), decode_views(PageIndices)
    ring = PinnedIndexRing()

    def through_ring() -> None:
        ring.begin_plan()
        build_paged_indptrs(packed, PAGE_SIZE, ring)

    lens = build_paged_indptrs(packed, PAGE_SIZE).kv_lens
    assert lens is not None
    plain = torch.from_numpy(lens.numpy().copy())
    host, tensor = best_microseconds(lambda: max(lens)), best_microseconds(lambda: max(plain), 1)
    return [
        ("build_paged_indptrs, PageIndices", best_microseconds(planned(packed)), "60"),
        ("build_paged_indptrs, PageIndices, into a ring", best_microseconds(through_ring), ""),
        ("build_paged_indptrs, plain lists", best_microseconds(planned(lists)), ""),
        ("longest row of a HostLens", host, f"{tensor / 10:.1f}"),
        ("longest row of a tensor", tensor, ""),
        ("KVManager admit + plan + commit", best_microseconds(manager_step(), 1), "300"),
    ]


def planned(views: list[SequenceView]) -> Callable[[], object]:
    return lambda: build_paged_indptrs(views, PAGE_SIZE)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def report(rows: list[tuple[str, float, str]]) -> str:
    table = [f"| {name} | {value:.1f} | {bound} |" for name, value, bound in rows]
    return "\n".join(
        [
            "# Planning a decode step",
            "",
            f"{ROWS} rows of {PAGES} pages, page size {PAGE_SIZE}; best of {REPETITIONS} "
            "repetitions, one thread.",
            "",
            "    python benchmarks/plan_benchmark.py --output benchmarks/results/plan.md",
            "",
            f"{processor()}; Python {platform.python_version()}, torch {torch.__version__}, "
            f"numpy {np.__version__}",
            "",
            "| what | microseconds | wanted at most |",
            "|---|---:|---:|",
            *table,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table here instead of printing it")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    text = report(measure())
    if output is None:
        print(text)
    else:
        output.write_text(text)


if __name__ == "__main__":
    main()
