"""Decode and prefill speed of engines on one card, two sides at a time; a table last.

`gpu_serving.py --config FOLDER PAIR...`, the folder holding a config.json; weights are dummies. A
side idles while the other is timed; the order changes every turn. Numbers are medians over turns,
`speed` is against the pair's first side in the same turn: the median and the range. A turn of steps
is their median; `build us` is the host time of the attention metadata builder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_pipes import pipes

HERE = Path(__file__).resolve().parent
GIB = 2**30
RETENTION = {"context_budget": 2048, "protected_prefix": 128, "positions": "absolute"}
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enable_prefix_caching": False,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.3,
    "cudagraph_capture_sizes": [1, 4, 8, 16, 48, 64, 256],
    "disable_log_stats": True,
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sides by name, each with its arguments, and the points both are timed at: requests and
    their tokens of context; a side that `batches` names has as many requests as that says.
    """

    sides: dict[str, dict[str, Any]]
    points: list[tuple[int, int]]
    cache_gib: dict[str, int]
    max_model_len: int
    batches: dict[str, int] = field(default_factory=dict)
    chunk: int = 8192


def mstar(kernels: str, retention: dict[str, Any] | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {"kernels": kernels}
    if retention is not None:
        settings["retention"] = retention
    return {"attention_backend": "mstar", "additional_config": {"mstar": settings}}


def pairs() -> dict[str, Pair]:
    unbounded = [
        *((batch, 1024) for batch in (1, 8, 64, 256)),
        *((1, 8192), (8, 8192), (64, 4096), (1, 32000), (8, 32000)),
    ]
    made = {}
    for kernels, name in (("flash_attn", "FLASH_ATTN"), ("flashinfer", "FLASHINFER")):
        stock = {"attention_backend": name}
        made[f"{kernels}-unbounded"] = Pair(
            sides={name: stock, "mstar": mstar(kernels)},
            points=unbounded,
            cache_gib={name: 40, "mstar": 40},
            max_model_len=36864,
        )
        made[f"{kernels}-bounded"] = Pair(
            sides={name: stock, "mstar B=2048 P=128": mstar(kernels, RETENTION)},
            points=[(16, 16), (16, 30000)],
            cache_gib={name: 62, "mstar B=2048 P=128": 12},
            max_model_len=40960,
        )
    made["flat"] = Pair(
        sides={"mstar B=2048 P=128": mstar("flash_attn", RETENTION)},
        points=[(4, 4096), (4, 30000), (4, 120000)],
        cache_gib={"mstar B=2048 P=128": 12},
        max_model_len=131072,
    )
    bounded = "mstar B=2048 P=128"
    stock = {"attention_backend": "FLASH_ATTN"}
    made["saturation"] = Pair(
        sides={"FLASH_ATTN": stock, bounded: mstar("flash_attn", RETENTION)},
        points=[(4, 30000)],
        cache_gib={"FLASH_ATTN": 16, bounded: 16},
        max_model_len=40960,
        batches={bounded: 48},
        chunk=2048,
    )
    made["kernels"] = Pair(
        sides={"mstar flash_attn": mstar("flash_attn"), "mstar flashinfer": mstar("flashinfer")},
        points=[(1, 1024), (64, 4096), (256, 1024), (8, 32000)],
        cache_gib={"mstar flash_attn": 40, "mstar flashinfer": 40},
        max_model_len=36864,
    )
    made["positions"] = Pair(
        sides={
            "absolute": mstar("flash_attn", RETENTION),
            "rolling": mstar("flash_attn", {**RETENTION, "positions": "rolling"}),
        },
        points=[(1, 8192), (16, 8192), (64, 4096)],
        cache_gib={"absolute": 24, "rolling": 24},
        max_model_len=40960,
    )
    return made


@dataclass(kw_only=True)
class Engine:
    """A side's process."""

    name: str
    process: subprocess.Popen[str]
    batch: int | None = None
    step_ms: list[float] = field(default_factory=list)
    build_us: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)

    def ask(self, **command: Any) -> dict[str, Any]:
        sent, _ = pipes(self.process)
        sent.write(json.dumps(command) + "\n")
        sent.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        line = pipes(self.process)[1].readline()
        if not line:
            raise RuntimeError(f"{self.name} ended, see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def begin(self, batch: int, context: int) -> None:
        """Prefill in place of what is in flight."""
        self.ask(do="stop")
        answer = self.ask(do="start", batch=self.batch or batch, context=context)
        self.prefill_s.append(answer["prefill_s"])

    def turn(self, count: int) -> None:
        answer = self.ask(do="steps", count=count)
        self.step_ms.append(statistics.median(answer["step_ms"]))
        self.build_us.append(statistics.median(answer["build_us"]))

    def end(self) -> None:
        pipes(self.process)[0].close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(pair: Pair, name: str, config: Path, logs: Path) -> Engine:
    engine = {
        "model": str(config),
        **ENGINE,
        **pair.sides[name],
        "max_model_len": pair.max_model_len,
        "max_num_batched_tokens": pair.chunk,
        "kv_cache_memory_bytes": pair.cache_gib[name] * GIB,
    }
    log = (logs / f"{name.replace(' ', '-')}-{pair.max_model_len}.log").open("w")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "gpu_side.py"), json.dumps(engine)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return Engine(name=name, process=process, batch=pair.batches.get(name))


def measure(engines: list[Engine], point: tuple[int, int], arguments: argparse.Namespace) -> None:
    for engine in engines:
        engine.step_ms, engine.build_us, engine.prefill_s = [], [], []
    for turn in range(arguments.prefills):
        for engine in engines[:: -1 if turn % 2 else 1]:
            engine.begin(*point)
    for turn in range(arguments.turns):
        for engine in engines[:: -1 if turn % 2 else 1]:
            engine.turn(arguments.steps)
    for engine in engines:
        engine.ask(do="stop")


def row(engine: Engine, first: Engine, asked: int, context: int) -> str:
    batch = engine.batch or asked
    share = batch / (first.batch or asked)
    step = statistics.median(engine.step_ms)
    return (
        f"| {engine.name} | {batch} | {context:,} | {step:.3f} | {1e3 * batch / step:,.0f} | "
        f"{speed(first.step_ms, engine.step_ms, share)} | "
        f"{statistics.median(engine.prefill_s):.3f} | "
        f"{speed(first.prefill_s, engine.prefill_s, share)} | "
        f"{statistics.median(engine.build_us):.0f} |"
    )


def speed(first: list[float], own: list[float], share: float) -> str:
    """How much faster than the first side, turn by turn; share: of the work, its to the first's."""
    ratios = [share * a / b for a, b in zip(first, own, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


HEADER = """
| side | batch | context | step ms | tokens/s | speed | prefill s | speed | build us |
|---|---|---|---|---|---|---|---|---|"""


def run(name: str, pair: Pair, arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """The rows that were measured, and whether an engine ended before all were."""
    begin = time.perf_counter()
    engines = [start(pair, side, arguments.config, arguments.logs) for side in pair.sides]
    rows, failed = [], False
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.answer, engines))
        print(f"{name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
        for batch, context in pair.points:
            measure(engines, (batch, context), arguments)
            for engine in engines:
                rows.append(row(engine, engines[0], batch, context))
                print(rows[-1], flush=True)
    except RuntimeError as error:
        failed = True
        print(f"{name}: {error}", flush=True)
    finally:
        for engine in engines:
            engine.end()
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return rows, failed


def main() -> None:
    known = pairs()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", metavar="PAIR", choices=known, help=", ".join(known))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--prefills", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    results = [run(name, known[name], arguments) for name in arguments.pairs]
    print(HEADER, *(line for rows, _ in results for line in rows), sep="\n")
    sys.exit(any(failed for _, failed in results))


if __name__ == "__main__":
    main()
