"""mstar against the stock backend on one machine, alternating: `python benchmarks/serving.py WHAT`.

`parity`: nothing bounded, one and sixteen clients. `unreached`: a budget larger than any context.
`retention`: latency and prefill over a long context with a budget of 512. `positions`: rolling
against absolute ones. `pool`: sixteen long generations on one fixed pool.
Each side is an engine in a process of its own, started once; the sides take turns at every repeat.
Writes benchmarks/results/<name>.md; figures are medians, with the range of the paired ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_pipes import pipes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
BOUNDED = {"mstar": {"retention": {"context_budget": 512, "protected_prefix": 4}}}


@dataclass(frozen=True)
class Figure:
    """One figure of a run: its unit, and whether more is better."""

    name: str
    unit: str
    more_is_better: bool = False


THROUGHPUT = Figure("tokens per second", "tokens/s", more_is_better=True)
LATENCY = Figure("inter-token latency", "ms between tokens")
PREFILL = Figure("prefill", "s of prefill")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One run: how it is asked of an engine, and which of its figures are reported."""

    name: str
    request: dict[str, int]
    figures: tuple[Figure, ...]


class Engine:
    """An engine in a process of its own that answers one measurement at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask({"prompt": 32, "clients": 1, "tokens": 8})

    def ask(self, request: dict[str, int]) -> dict[str, float]:
        sent, received = pipes(self._process)
        sent.write(json.dumps(request) + "\n")
        sent.flush()
        for line in received:
            if line.startswith("figures "):
                found: dict[str, float] = json.loads(line.removeprefix("figures "))
                return found
        raise RuntimeError(f"the engine ended with {self._process.wait()}")

    def close(self) -> None:
        pipes(self._process)[0].close()
        self._process.wait(60)


@contextmanager
def engines(sides: dict[str, dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    started = {name: Engine(arguments) for name, arguments in sides.items()}
    try:
        yield started
    finally:
        for engine in started.values():
            engine.close()


Figures = dict[tuple[str, str], dict[str, list[float]]]


def compare(
    sides: dict[str, dict[str, Any]], measures: list[Measure], repeats: int, warm_up: bool = True
) -> Figures:
    """Values by (measure, figure) and side, the sides taking turns and the first changing each
    time; with `warm_up` a first round is not counted.
    """
    figures: Figures = {
        (m.name, f.name): {s: [] for s in sides} for m in measures for f in m.figures
    }
    with engines(sides) as running:
        for repeat in range(0 if warm_up else 1, repeats + 1):
            for measure in measures:
                order = list(running) if repeat % 2 else list(running)[::-1]
                for side in order:
                    values = running[side].ask(measure.request)
                    for figure in measure.figures if repeat else ():
                        figures[measure.name, figure.name][side].append(values[figure.name])
                    print(f"{repeat}. {measure.name} {side}: {values}", flush=True)
    return figures


def table(measures: list[Measure], figures: Figures) -> str:
    """A Markdown table; a ratio above 1 is in the second side's favour."""
    first, second = next(iter(figures.values()))
    rows = [f"| figure | {first} | {second} | ratio | range of ratios |", "|---|---|---|---|---|"]
    rows += [
        row(f"{measure.name} ({figure.unit})", figure, *figures[measure.name, figure.name].values())
        for measure in measures
        for figure in measure.figures
    ]
    return "\n".join(rows)


def row(name: str, figure: Figure, stock: list[float], ours: list[float]) -> str:
    pairs = zip(stock, ours, strict=True)
    ratios = [o / s if figure.more_is_better else s / o for s, o in pairs]
    return (
        f"| {name} | {statistics.median(stock):.2f} | {statistics.median(ours):.2f} | "
        f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
    )


def environment_line(dtype: str) -> str:
    import torch
    import vllm

    name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, vLLM {vllm.__version__}, "
        f"SmolLM2-135M-Instruct in {dtype}, eager"
    )


def write(name: str, dtype: str, title: str, notes: str, body: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/serving.py", *sys.argv[1:]])
    text = f"# {title}\n\n{environment_line(dtype)}\n\n`{command}`\n\n{notes}\n\n{body}\n"
    (RESULTS / f"cpu-{name}.md").write_text(text)
    print(text)


def arguments(backend: str, dtype: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(MODEL),
        "attention_backend": backend,
        "dtype": dtype,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "max_num_batched_tokens": 2048,
        **changes,
    }


def beside_stock(
    name: str, repeats: int, dtype: str, tokens: int, title: str, notes: str, **changes: Any
) -> None:
    """Short requests of one and of sixteen clients; `changes` are to mstar's engine."""
    sides = {
        "CPU_ATTN": arguments("CPU_ATTN", dtype, max_model_len=2048),
        "mstar": arguments("mstar", dtype, max_model_len=2048, **changes),
    }
    measures = [
        Measure(
            name=f"{clients} client(s), 128 prompt and {tokens} new tokens",
            request={"prompt": 128, "clients": clients, "tokens": tokens},
            figures=(THROUGHPUT, LATENCY),
        )
        for clients in (1, 16)
    ]
    notes = f"{notes}Ratios above 1 are in mstar's favour."
    write(name, dtype, title, notes, table(measures, compare(sides, measures, repeats)))


def parity(repeats: int, dtype: str) -> None:
    title = "Nothing bounded: mstar against CPU_ATTN"
    beside_stock("parity", repeats, dtype, 128, title, "")


def unreached(repeats: int, dtype: str) -> None:
    title = "A budget that no request reaches: mstar against CPU_ATTN"
    beside_stock("unreached", repeats, dtype, 256, title, "B=512, P=4. ", additional_config=BOUNDED)


def retention(repeats: int, dtype: str) -> None:
    sides = {
        "CPU_ATTN": arguments("CPU_ATTN", dtype, max_model_len=8192),
        "mstar": arguments("mstar", dtype, max_model_len=8192, additional_config=BOUNDED),
    }
    measures = [
        Measure(
            name=f"{context} tokens of context",
            request={"prompt": context, "clients": 1, "tokens": 64},
            figures=(LATENCY, PREFILL),
        )
        for context in (1000, 7500)
    ]
    figures = compare(sides, measures, repeats)
    short, long = (figures[measure.name, LATENCY.name] for measure in measures)
    growth = {s: statistics.median(long[s]) / statistics.median(short[s]) for s in sides}
    notes = "B=512, P=4, chunks of 2,048. Ratios above 1 are in mstar's favour."
    body = (
        table(measures, figures)
        + "\n\nLatency at 7,500 over that at 1,000: "
        + ", ".join(f"{side} {ratio:.2f}" for side, ratio in growth.items())
    )
    write("retention", dtype, "Long context: a budget of 512 against everything", notes, body)


def positions(repeats: int, dtype: str) -> None:
    """Rolling positions turn a copy of the protected pages with each released page."""
    bound = {"context_budget": 512, "protected_prefix": 64}
    sides = {
        name: arguments(
            "mstar",
            dtype,
            max_model_len=8192,
            block_size=32,
            additional_config={"mstar": {"retention": {**bound, "positions": name}}},
        )
        for name in ("absolute", "rolling")
    }
    measures = [
        Measure(
            name=f"{clients} client(s) at 2,000 tokens of context",
            request={"prompt": 2000, "clients": clients, "tokens": 128},
            figures=(LATENCY, PREFILL),
        )
        for clients in (1, 8)
    ]
    write(
        "positions",
        dtype,
        "Rolling positions against absolute ones",
        "B=512, P=64, pages of 32, chunks of 2,048. Ratios above 1 are in rolling's favour.",
        table(measures, compare(sides, measures, repeats)),
    )


def pool(repeats: int, dtype: str) -> None:
    fixed = {"max_model_len": 4096, "block_size": 32, "num_gpu_blocks_override": 260}
    fixed["max_num_batched_tokens"] = 256
    sides = {
        "CPU_ATTN": arguments("CPU_ATTN", dtype, **fixed),
        "mstar": arguments("mstar", dtype, additional_config=BOUNDED, **fixed),
    }
    measures = [
        Measure(
            name="16 generations of 3,000 tokens on a pool of 8,288",
            request={"prompt": 64, "clients": 16, "tokens": 3000},
            figures=(THROUGHPUT,),
        )
    ]
    write(
        "pool",
        dtype,
        "One fixed KV pool: a budget of 512 against everything",
        f"B=512, P=4, pages of 32, chunks of 256; {repeats} run(s) of minutes on either side.",
        table(measures, compare(sides, measures, repeats, warm_up=False)),
    )


BENCHMARKS: dict[str, tuple[Callable[[int, str], None], int]] = {
    "parity": (parity, 7),
    "retention": (retention, 5),
    "positions": (positions, 5),
    "unreached": (unreached, 7),
    "pool": (pool, 1),
}


def serve_measurements(engine: dict[str, Any]) -> None:
    """The engine's side: a request a line on standard input, its figures on standard output."""
    from vllm import LLM

    llm = LLM(**engine, disable_log_stats=False)
    for number, line in enumerate(sys.stdin):
        print(f"figures {json.dumps(measured(llm, json.loads(line), number))}", flush=True)


def measured(llm: Any, request: dict[str, int], number: int) -> dict[str, float]:
    """Latency is that of steps in which all clients decode, the mean between the last one's first
    token and the first one's last.
    """
    from vllm import SamplingParams

    engine, clients = llm.llm_engine, request["clients"]
    params = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
    started = time.perf_counter()
    for client in range(clients):
        tokens = [
            100 + (number * 97 + client * 31 + i * 7) % 40000 for i in range(request["prompt"])
        ]
        engine.add_request(f"{number}-{client}", {"prompt_token_ids": tokens}, params)
    decoding: list[float] = []
    begun: set[str] = set()
    done: list[Any] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        begun |= {output.request_id for output in outputs}
        done += [output.metrics for output in outputs if output.finished]
        if len(begun) == clients and not done:
            decoding.append(time.perf_counter())
    elapsed = time.perf_counter() - started
    between = (decoding[-1] - decoding[0]) / (len(decoding) - 1) if len(decoding) > 1 else math.nan
    return {
        THROUGHPUT.name: clients * request["tokens"] / elapsed,
        LATENCY.name: 1000 * between,
        PREFILL.name: statistics.median(s.first_token_ts - s.scheduled_ts for s in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(BENCHMARKS))
    parser.add_argument("--repeats", type=int, help="turns per side")
    parser.add_argument(
        "--dtype", default="bfloat16", help="float32 for processors without bfloat16 instructions"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve_measurements(json.loads(options.engine))
        return
    for what in options.what or BENCHMARKS:
        run, repeats = BENCHMARKS[what]
        run(options.repeats or repeats, options.dtype)


if __name__ == "__main__":
    main()
