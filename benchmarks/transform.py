"""Microseconds of the batch transform on CPU: `python benchmarks/transform.py`.

64 decode rows, and a chunk of 2,048 tokens, with nothing bounded, with a policy nobody has reached,
and with pages released. Writes benchmarks/results/cpu-transform.md.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.visibility import RowLimits, transform

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK = 128
POLICY = RetentionPolicy(2048, 64)


def batch(rows: int, query_len: int, seq_len: int) -> CommonAttentionMetadata:
    starts = torch.arange(rows + 1, dtype=torch.int32) * query_len
    lens = torch.full((rows,), seq_len, dtype=torch.int32)
    width = -(-seq_len // BLOCK)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=rows,
        num_actual_tokens=rows * query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        block_table_tensor=torch.ones(rows, width, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )


def microseconds(call: Callable[[], object], repeats: int = 2000) -> tuple[float, float]:
    """Median and 90th percentile of one call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1000)
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def main() -> None:
    limits = RowLimits.of_policy(POLICY, BLOCK)
    decode, chunk = (64, 1), (1, 2048)
    cases = {
        "64 decode rows at 8,192, nothing bounded": (batch(*decode, 8192), None),
        "64 decode rows at 2,000, policy not reached": (batch(*decode, 2000), limits),
        "64 decode rows at 8,192, pages released": (batch(*decode, 8192), limits),
        "a chunk of 2,048 tokens ending at 8,192, pages released": (batch(*chunk, 8192), limits),
    }
    rows = ["| case | median | 90 % |", "|---|---|---|"]
    for name, (metadata, bounds) in cases.items():
        median, high = microseconds(partial(transform, metadata, bounds, BLOCK))
        rows.append(f"| {name} | {median:.1f} µs | {high:.1f} µs |")
    title = "# The batch transform on CPU\n\nB=2048, P=64, pages of 128"
    how = f"`python benchmarks/transform.py`, {os.cpu_count()} cores, torch {torch.__version__}"
    text = f"{title}; {how}\n\n" + "\n".join(rows) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cpu-transform.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
