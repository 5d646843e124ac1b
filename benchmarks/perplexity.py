"""Perplexity by position under retention: `python benchmarks/perplexity.py [--tokens 8192]`.

One engine reads the licence texts that Debian ships, once for each policy; the perplexity
of every 1,024 tokens is reported. Writes benchmarks/results/perplexity.md and docs/perplexity.svg.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
LICENCES = Path("/usr/share/common-licenses")
TEXTS = ("GPL-3", "GFDL-1.3", "MPL-2.0", "Apache-2.0", "LGPL-2.1", "Artistic")
STEP = 1024
BUDGETS, PREFIXES = (512, 1024, 2048), (0, 4, 64)


def policies() -> dict[str, dict[str, int] | None]:
    named: dict[str, dict[str, int] | None] = {"everything": None}
    for budget in BUDGETS:
        for prefix in PREFIXES:
            named[f"B={budget} P={prefix}"] = {
                "mstar_context_budget": budget,
                "mstar_protected_prefix": prefix,
            }
    return named


def by_position(logprobs: list[float]) -> list[float]:
    """Perplexity of each `STEP` tokens."""
    steps = [logprobs[i : i + STEP] for i in range(0, len(logprobs), STEP)]
    return [math.exp(-sum(step) / len(step)) for step in steps if len(step) > STEP // 2]


def measure(num_tokens: int) -> dict[str, list[float]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(MODEL),
        attention_backend="mstar",
        dtype="float32",
        enforce_eager=True,
        max_model_len=num_tokens + 1,
        max_num_batched_tokens=1024,
        block_size=16,
        distributed_executor_backend="uni",
    )
    text = "".join((LICENCES / name).read_text() for name in TEXTS)
    tokens = llm.get_tokenizer()(text).input_ids[:num_tokens]
    curves = {}
    for name, policy in policies().items():
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args=policy)
        output = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0]
        curves[name] = by_position(chosen(tokens, output.prompt_logprobs))
        print(name, [round(value, 1) for value in curves[name]], flush=True)
    return curves


def chosen(tokens: list[int], prompt_logprobs: Any) -> list[float]:
    pairs = zip(tokens[1:], prompt_logprobs[1:], strict=True)
    return [step[token].logprob for token, step in pairs]


def write(curves: dict[str, list[float]]) -> None:
    import vllm

    heads = " | ".join(str((i + 1) * STEP) for i in range(len(curves["everything"])))
    rows = [f"| tokens up to | {heads} |", "|---" * (len(curves["everything"]) + 1) + "|"]
    for name, curve in curves.items():
        rows.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in curve) + " |")
    title = "# Perplexity by position: SmolLM2-135M-Instruct on licence texts, float32, pages of 16"
    how = f"vLLM {vllm.__version__} on CPU, `python benchmarks/perplexity.py`"
    table = "\n".join(rows)
    (ROOT / "benchmarks" / "results" / "perplexity.md").write_text(f"{title}\n\n{how}\n\n{table}\n")


def plot(curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mstar"
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, curve in curves.items():
        style = (
            "-" if name == "everything" else {"0": ":", "4": "-", "64": "--"}[name.split("=")[-1]]
        )
        positions = [(i + 1) * STEP for i in range(len(curve))]
        axes.plot(positions, curve, style, label=name, linewidth=2.5 if style == "-" else 1.2)
    axes.set(xlabel="position (tokens)", ylabel="perplexity", title="SmolLM2-135M, licence texts")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "perplexity.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    curves = measure(parser.parse_args().tokens)
    write(curves)
    plot(curves)


if __name__ == "__main__":
    main()
