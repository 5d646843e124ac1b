"""Time of the batch transform itself, on the host and on the device; a table last."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from gpu_timing import host_us, timer
from vllm.v1.attention.backend import CommonAttentionMetadata

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_limits import DeviceBatchLimits
from mstar_vllm.device_rows import Pages
from mstar_vllm.device_visibility import BatchShape, DeviceVisibility

DEVICE = torch.device("cuda")
PAGE = 16
MAX_LEN = 131072
LAUNCHES_A_GRAPH = 20


def visibility(policy: RetentionPolicy | None, plans_on_host: bool) -> DeviceVisibility:
    spec = RetentionSpec(
        block_size=PAGE,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        context_budget=policy.context_budget if policy else None,
        protected_prefix=policy.protected_prefix if policy else 0,
    )
    shape = BatchShape(
        pages=Pages(page_tokens=PAGE, block_tokens=PAGE),
        max_requests=256,
        max_model_len=MAX_LEN,
        drafts=0,
        plans_on_host=plans_on_host,
    )
    return DeviceVisibility(shape, DeviceBatchLimits(spec, 256, DEVICE), DEVICE)


def batch_of(rows: int, query: int, stored: int) -> CommonAttentionMetadata:
    starts = torch.arange(0, rows * query + 1, query, dtype=torch.int32)
    lens = torch.full((rows,), stored, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=rows,
        num_actual_tokens=rows * query,
        max_query_len=query,
        max_seq_len=stored,
        block_table_tensor=torch.zeros(rows, MAX_LEN // PAGE, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(rows * query, dtype=torch.int64, device=DEVICE),
    )


def device_us(call: Callable[[], object]) -> float:
    """Per call, from replays of a graph of many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES_A_GRAPH):
            call()
    times = []
    for _ in range(30):
        begin, end = timer(), timer()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES_A_GRAPH)
    return float(statistics.median(times))


def rows_of(parent: str, plans_on_host: bool) -> list[str]:
    bounded = visibility(RetentionPolicy(2048, 128), plans_on_host)
    free = visibility(None, plans_on_host)
    decode, chunks = batch_of(256, 1, 30000), batch_of(16, 512, 30000)
    calls: dict[str, tuple[Callable[[], object], bool]] = {
        "decode, 256 rows": (lambda: bounded.visible(decode), True),
        "decode, 256 rows, nothing bounded": (lambda: free.visible(decode), False),
        "prefill, 16 x 512 tokens": (lambda: bounded.visible(chunks), False),
    }
    return [
        f"| {parent} | {what} | {host_us(call):.1f} | "
        f"{f'{device_us(call):.1f}' if on_device else '-'} |"
        for what, (call, on_device) in calls.items()
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = rows_of("FlashAttention", False) + rows_of("FlashInfer", True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, numpy {np.__version__}")
    print("| parent | batch | host us | device us |", "|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
