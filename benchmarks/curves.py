"""What a token costs and what a request holds, by its length: `python benchmarks/curves.py`.

One request generates 3,000 tokens on either side, a step at a time; after each step its time and
the memory of the blocks in use are read. Writes benchmarks/results/cpu-curves.md and
docs/cost-and-memory.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from serving import BOUNDED, RESULTS, ROOT, arguments, environment_line

TOKENS, PROMPT, SPAN, DTYPE = 3000, 64, 200, "bfloat16"
SIDES: dict[str, dict[str, Any]] = {
    "CPU_ATTN": arguments("CPU_ATTN", DTYPE, max_model_len=4096),
    "mstar, B=512 P=4": arguments("mstar", DTYPE, max_model_len=4096, additional_config=BOUNDED),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
Curve = dict[str, list[float]]


def generate(engine_arguments: dict[str, Any]) -> Curve:
    """Milliseconds between tokens and MB in use, medians over `SPAN` tokens."""
    from vllm import LLM, SamplingParams

    engine: Any = LLM(**engine_arguments).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    groups = scheduler.kv_cache_config.kv_cache_groups
    page_bytes = sum(len(g.layer_names) * g.kv_cache_spec.page_size_bytes for g in groups)
    num_pages = scheduler.kv_cache_config.num_blocks - 1
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    engine.add_request("one", {"prompt_token_ids": list(range(100, 100 + PROMPT))}, params)
    engine.step()
    times, held = [], []
    while engine.has_unfinished_requests():
        pages = round(scheduler.kv_cache_manager.usage * num_pages)
        begin = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - begin))
        held.append(pages * page_bytes / 1e6)
    spans = range(0, len(times) - SPAN + 1, SPAN)
    return {
        "tokens": [float(PROMPT + begin + SPAN) for begin in spans],
        "ms": [statistics.median(times[begin : begin + SPAN]) for begin in spans],
        "mb": [statistics.median(held[begin : begin + SPAN]) for begin in spans],
    }


def run(side: str) -> Curve:
    command = [sys.executable, __file__, "--side", side]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True
    )
    curve: Curve = json.loads(done.stdout.splitlines()[-1])
    return curve


def write(curves: dict[str, Curve]) -> None:
    rows = [
        "| tokens | " + " | ".join(f"{s}, ms | {s}, MB" for s in curves) + " |",
        "|---" * (1 + 2 * len(curves)) + "|",
    ]
    for number, tokens in enumerate(next(iter(curves.values()))["tokens"]):
        cells = (f"{c['ms'][number]:.1f} | {c['mb'][number]:.1f}" for c in curves.values())
        rows.append(f"| {tokens:,.0f} | " + " | ".join(cells) + " |")
    notes = f"One request, chunks of 2,048; medians over {SPAN} tokens, one run of either side."
    lines = ["# Cost and memory by length", environment_line(DTYPE)]
    lines += ["`python benchmarks/curves.py`", notes, "\n".join(rows)]
    (RESULTS / "cpu-curves.md").write_text("\n\n".join(lines) + "\n")


def plot(curves: dict[str, Curve]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mstar"
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axes, key, label in zip(
        both, ("ms", "mb"), ("ms between tokens", "KV cache in use (MB)"), strict=True
    ):
        for side, curve in curves.items():
            axes.plot(curve["tokens"], curve[key], label=side, linewidth=1.4)
        axes.set(xlabel="length (tokens)", ylabel=label, ylim=(0, None))
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "cost-and-memory.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    side = parser.parse_args().side
    if side:
        print(json.dumps(generate(SIDES[side])), flush=True)
        return
    curves = {name: run(name) for name in SIDES}
    write(curves)
    plot(curves)


if __name__ == "__main__":
    main()
