"""Seconds per frame of the served frame decoder, early and late in a session.

    python scripts/frame_model.py
    python benchmarks/frame_serving.py --out benchmarks/results/frame-serving.md

One engine keeps the model's rings, one serves the same weights with full attention on the stock
backend; each in a process of its own, taking turns. A session is brought to a frame by its prompt,
then ten frames are decoded and timed. Figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "tiny" / "frame-decoder"
TOKENS_PER_FRAME = 16
TIMED_FRAMES = 10
EARLY, LATE = 10, 1000
SIDES: dict[str, dict[str, Any]] = {
    "rings": {"attention_backend": "mstar"},
    "full attention": {
        "attention_backend": "CPU_ATTN",
        "hf_overrides": {"mstar": None, "architectures": ["LlamaForCausalLM"]},
        "block_size": 32,
    },
}


class Engine:
    """An engine in a process of its own that times sessions one at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
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
        self.seconds_per_frame(2)

    def seconds_per_frame(self, frame: int) -> float:
        """Time per frame of a session that has `frame` frames."""
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise RuntimeError("the engine's process must have pipes")
        sent.write(f"{frame}\n")
        sent.flush()
        for line in received:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"the engine ended with {self._process.wait()}")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def engines(model: Path) -> Iterator[dict[str, Engine]]:
    started: dict[str, Engine] = {}
    common = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "max_model_len": (LATE + 2 * TIMED_FRAMES) * TOKENS_PER_FRAME,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    }
    try:
        for name, side in SIDES.items():
            started[name] = Engine({**common, **side})
        yield started
    finally:
        for engine in started.values():
            engine.close()


def measure(model: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Per side, (early, late) seconds per frame of each repeat."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    with engines(model) as running:
        for repeat in range(repeats):
            for name in list(running)[:: 1 if repeat % 2 else -1]:
                early = running[name].seconds_per_frame(EARLY)
                late = running[name].seconds_per_frame(LATE)
                figures[name].append((early, late))
                print(f"{name}: {early:.4f} s, {late:.4f} s", flush=True)
    return figures


def report(figures: dict[str, list[tuple[float, float]]]) -> str:
    rows = [
        f"| side | ms per frame at {EARLY} | at {LATE:,} | ratio | range of ratios |",
        "|---|---|---|---|---|",
    ]
    for name, pairs in figures.items():
        early, late = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = [after / before for before, after in pairs]
        rows.append(
            f"| {name} | {early:.2f} | {late:.2f} | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return "\n".join(rows)


def document(table: str, repeats: int) -> str:
    import torch
    import vllm

    return (
        "# Seconds per frame, early and late in a session\n\n"
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, vLLM {vllm.__version__}, frame decoder of scripts/frame_model.py in "
        f"float32, one session, {repeats} repeats\n\n"
        f"`python benchmarks/frame_serving.py`\n\n{table}\n"
    )


def serve_measurements(engine: dict[str, Any]) -> None:
    """The engine's side: a frame number a line on standard input, seconds a line on standard
    output.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(**engine)
    params = SamplingParams(
        temperature=0, max_tokens=TIMED_FRAMES * TOKENS_PER_FRAME + 1, ignore_eos=True
    )
    for number, line in enumerate(sys.stdin):
        tokens = int(line) * TOKENS_PER_FRAME
        prompt = [(number * 97 + i * i * 31) % 256 for i in range(tokens)]
        llm.llm_engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
        print(f"seconds {timed(llm.llm_engine)}", flush=True)


def timed(engine: Any) -> float:
    """Seconds per frame between the request's first token and its last."""
    began = 0.0
    while engine.has_unfinished_requests():
        has_tokens = any(output.outputs[0].token_ids for output in engine.step())
        if has_tokens and not began:
            began = time.perf_counter()
    return (time.perf_counter() - began) / TIMED_FRAMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve_measurements(json.loads(options.engine))
        return
    text = document(report(measure(options.model, options.repeats)), options.repeats)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
