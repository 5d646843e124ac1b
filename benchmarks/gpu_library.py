"""A decode step of the library on a card: planning of 128 rows and FlashInfer's decode kernel.

    python benchmarks/gpu_library.py

Host times are medians over steps that wait for nothing, the device is emptied now and then,
untimed. `HostLens` spares the planner a wait per row, the pinned ring spares the copies' staging.
The last lines time one layer's attention against the bytes it must read.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from gpu_timing import host_us, timer

from mstar_plugin.attention import AttentionParams
from mstar_plugin.attention.flashinfer import FlashInferPlanner, GraphSize
from mstar_plugin.kv.plan import (
    PagedIndptrs,
    PageIndices,
    PinnedIndexRing,
    SequenceView,
    build_paged_indptrs,
)

DEVICE = torch.device("cuda")
ROWS, PAGE = 128, 16
PARAMS = AttentionParams(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=PAGE)
BYTES_A_TOKEN = 2 * 8 * 128 * 2
MOST_BYTES_A_SECOND = 4.3e12


def decode_views(rows: int, tokens: int) -> list[SequenceView]:
    pages = -(-tokens // PAGE)
    return [
        SequenceView(
            f"r{row}", "main", PageIndices(range(row * pages, (row + 1) * pages)), tokens, 1
        )
        for row in range(rows)
    ]


def with_tensor_lens(indptrs: PagedIndptrs) -> PagedIndptrs:
    assert indptrs.kv_lens is not None
    return indptrs._replace(kv_lens=torch.from_numpy(indptrs.kv_lens.numpy().copy()))


def planning() -> list[str]:
    """Host microseconds of a step's plan, index arrays and FlashInfer's own planning together."""
    views, ring = decode_views(ROWS, 512), PinnedIndexRing(8192)
    planner = FlashInferPlanner(PARAMS, DEVICE, torch.bfloat16)

    def through_ring() -> None:
        ring.begin_plan()
        planner.plan(build_paged_indptrs(views, PAGE, ring))

    def arrays_alone() -> None:
        ring.begin_plan()
        build_paged_indptrs(views, PAGE, ring)

    ways: dict[str, Callable[[], object]] = {
        "HostLens and pinned ring": through_ring,
        "HostLens": lambda: planner.plan(build_paged_indptrs(views, PAGE)),
        "neither": lambda: planner.plan(with_tensor_lens(build_paged_indptrs(views, PAGE))),
        "index arrays alone, pinned ring": arrays_alone,
    }
    return [f"| {name} | {host_us(call):.0f} |" for name, call in ways.items()]


def attention(rows: int, tokens: int) -> str:
    """One layer's decode attention from a captured graph, and its bytes over the bandwidth."""
    views = decode_views(rows, tokens)
    pages = rows * -(-tokens // PAGE)
    graph_size = GraphSize(num_rows=rows, max_pages=pages)
    planner = FlashInferPlanner(PARAMS, DEVICE, torch.bfloat16, graph=graph_size)
    planner.plan(build_paged_indptrs(views, PAGE))
    cache = torch.randn(pages, 2, PAGE, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    query = torch.randn(rows, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    planner.run(query, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            planner.run(query, cache)
    times = []
    for _ in range(20):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    measured = statistics.median(times)
    least = 1e6 * rows * tokens * BYTES_A_TOKEN / MOST_BYTES_A_SECOND
    return f"| {rows} | {tokens:,} | {measured:.1f} | {least:.1f} | {measured / least:.2f} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| plan of 128 decode rows of 32 pages | host us |", "|---|---|", *planning(), sep="\n")
    print("| rows | tokens each | attention us | bytes / 4.3 TB/s, us | ratio |")
    print("|---|---|---|---|---|")
    for rows, tokens in ((16, 2192), (64, 2192), (128, 2192), (16, 30000)):
        print(attention(rows, tokens))


if __name__ == "__main__":
    main()
