"""Perplexity by position under retention: `python benchmarks/perplexity.py [PART ...]`.

`budgets`: up to the trained length, for several budgets and prefixes. `positions`: to four times
the trained length, absolute against rolling. One engine reads the licence texts that Debian ships,
once for each policy; the perplexity of every 1,024 tokens is reported. Writes
benchmarks/results/perplexity-PART.md and docs/perplexity-PART.svg.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
LICENCES = Path("/usr/share/common-licenses")
TEXTS: tuple[str, ...] = (
    *("GPL-3", "GFDL-1.3", "MPL-2.0", "Apache-2.0", "LGPL-2.1", "Artistic"),
    *("GPL-1", "GFDL-1.2", "GPL-2", "MPL-1.1", "LGPL-2", "LGPL-3"),
)
STEP = 1024
TRAINED = 8192


@dataclass(frozen=True)
class Part:
    """Which policies read how many tokens; `retention` is the server's, None for none.

    "everything" reads no further than the trained length.
    """

    title: str
    tokens: int
    retention: dict[str, Any] | None
    policies: dict[str, dict[str, Any] | None]


def policy(budget: int, prefix: int, **more: Any) -> dict[str, Any]:
    return {"mstar_context_budget": budget, "mstar_protected_prefix": prefix, **more}


PARTS = {
    "budgets": Part(
        title="by budget and prefix",
        tokens=TRAINED,
        retention=None,
        policies={
            "everything": None,
            **{f"B={b} P={p}": policy(b, p) for b in (512, 1024, 2048) for p in (0, 4, 64)},
        },
    ),
    "positions": Part(
        title="absolute and rolling positions, B=1024",
        tokens=4 * TRAINED,
        retention={"context_budget": TRAINED, "protected_prefix": 64, "positions": "rolling"},
        policies={
            "everything": policy(TRAINED, 64, mstar_positions="absolute"),
            "P=0": policy(1024, 0),
            **{
                f"P={p} {positions}": policy(1024, p, mstar_positions=positions)
                for p in (4, 64)
                for positions in ("absolute", "rolling")
            },
        },
    ),
}


def by_position(logprobs: list[float]) -> list[float]:
    """Perplexity of each `STEP` tokens."""
    steps = [logprobs[i : i + STEP] for i in range(0, len(logprobs), STEP)]
    return [math.exp(-sum(step) / len(step)) for step in steps if len(step) > STEP // 2]


def dtype() -> Literal["float16", "float32"]:
    """The kernels of a card take no float32."""
    import torch

    return "float16" if torch.cuda.is_available() else "float32"


def device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


def measure(part: Part, texts: Path) -> dict[str, list[float]]:
    from vllm import LLM, SamplingParams

    settings = {} if part.retention is None else {"retention": part.retention}
    llm = LLM(
        model=str(MODEL),
        attention_backend="mstar",
        dtype=dtype(),
        enforce_eager=True,
        max_model_len=part.tokens + 1,
        hf_overrides={"max_position_embeddings": part.tokens + 1},
        max_num_batched_tokens=1024,
        block_size=64,
        distributed_executor_backend="uni",
        additional_config={"mstar": settings},
    )
    text = "".join((texts / name).read_text() for name in TEXTS)
    tokens = llm.get_tokenizer()(text).input_ids[: part.tokens]
    if len(tokens) < part.tokens:
        raise ValueError(f"the texts must have {part.tokens} tokens, got {len(tokens)}")
    curves = {}
    for name, own in part.policies.items():
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args=own)
        read = tokens[:TRAINED] if name == "everything" else tokens
        output = llm.generate({"prompt_token_ids": read}, params, use_tqdm=False)[0]
        curves[name] = by_position(chosen(read, output.prompt_logprobs))
        print(name, [round(value, 1) for value in curves[name]], flush=True)
    return curves


def chosen(tokens: list[int], prompt_logprobs: Any) -> list[float]:
    pairs = zip(tokens[1:], prompt_logprobs[1:], strict=True)
    return [step[token].logprob for token, step in pairs]


def write(name: str, part: Part, curves: dict[str, list[float]]) -> None:
    import vllm

    rows = ["| tokens up to | " + " | ".join(curves) + " |", "|---" * (len(curves) + 1) + "|"]
    for step in range(max(map(len, curves.values()))):
        cells = (f"{curve[step]:.1f}" if step < len(curve) else "" for curve in curves.values())
        rows.append(f"| {(step + 1) * STEP:,} | " + " | ".join(cells) + " |")
    lines = [
        f"# Perplexity by position: {part.title}",
        "",
        f"SmolLM2-135M-Instruct (trained to {TRAINED:,} tokens) on licence texts, {dtype()}, pages "
        f"of 64, each value over {STEP:,} tokens; vLLM {vllm.__version__}, {device()}, "
        f"`python benchmarks/perplexity.py {name}`",
        "",
        *rows,
        "",
    ]
    (ROOT / "benchmarks" / "results" / f"perplexity-{name}.md").write_text("\n".join(lines))


def plot(name: str, part: Part, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mstar"
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for label, curve in curves.items():
        positions = [(i + 1) * STEP for i in range(len(curve))]
        style = ":" if "P=0" in label else "--" if "P=64" in label else "-"
        axes.plot(positions, curve, style, label=label, linewidth=1.4)
    title = f"SmolLM2-135M, licence texts: {part.title}"
    axes.set(xlabel="position (tokens)", ylabel="perplexity", title=title)
    axes.set_yscale("log")
    if part.tokens > TRAINED:
        axes.axvline(TRAINED, color="grey", linewidth=0.8)
        axes.annotate(" trained length", (TRAINED, axes.get_ylim()[1]), color="grey", va="top")
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / f"perplexity-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--texts", type=Path, default=LICENCES, help="folder with the texts")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        curves = measure(PARTS[name], options.texts)
        write(name, PARTS[name], curves)
        plot(name, PARTS[name], curves)


if __name__ == "__main__":
    main()
