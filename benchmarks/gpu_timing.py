"""How the benchmarks of single calls on a card time them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def host_us(call: Callable[[], object], repeats: int = 400) -> float:
    """Median over calls that wait for nothing; the device is emptied now and then, untimed."""
    times = []
    for repeat in range(repeats):
        if repeat % 20 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def timer() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)
