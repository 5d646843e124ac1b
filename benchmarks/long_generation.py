"""One very long answer of a running server per kind of positions, both at once.

    python benchmarks/long_generation.py URL [--tokens 40000]

The server must keep rolling positions. For each section of an answer: latency, how full the pool
was, the server's resident memory, and whether the text still makes sense: the model's own
perplexity of what was drawn at temperature 0.8, and the share of words that are new. Writes
benchmarks/results/long-generation.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
PROMPT = (
    "The history of navigation, from the first canoes to the age of steam. A book in forty "
    "chapters.\n\nChapter 1. The first boats\n\n"
)
SECTION = 4000
QUOTED = 300


@dataclass
class Answer:
    """What a client saw: per token its time, text and log-probability; per section the server."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    def sections(self) -> range:
        return range(0, len(self.texts) - SECTION + 1, SECTION)

    def latency(self, begin: int) -> float:
        """Median milliseconds between tokens."""
        times = self.times[begin : begin + SECTION]
        return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))

    def perplexity(self, begin: int) -> float:
        return math.exp(-statistics.mean(self.logprobs[begin : begin + SECTION]))

    def new_words(self, begin: int) -> float:
        """Different words over all words of the section."""
        words = re.findall(r"[a-z]+", "".join(self.texts[begin : begin + SECTION]).lower())
        return len(set(words)) / max(1, len(words))


def gauge(text: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else math.nan


def generate(url: str, positions: str, tokens: int) -> Answer:
    answer = Answer()
    with httpx.Client(timeout=600) as http:
        body: dict[str, Any] = {
            "model": http.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0.8,
            "seed": 1,
            "logprobs": 0,
            "ignore_eos": True,
            "stream": True,
            "vllm_xargs": {"mstar_positions": positions},
        }
        with http.stream("POST", f"{url}/v1/completions", json=body) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    take(json.loads(line.removeprefix("data: ")), url, positions, answer)
    return answer


def take(chunk: dict[str, Any], url: str, positions: str, answer: Answer) -> None:
    if "error" in chunk:
        raise RuntimeError(chunk["error"])
    for choice in chunk["choices"]:
        found = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        for text, logprob in zip(found["tokens"], found["token_logprobs"], strict=True):
            answer.times.append(time.perf_counter())
            answer.texts.append(text)
            answer.logprobs.append(logprob)
            if len(answer.texts) % SECTION == 0:
                metrics = httpx.get(f"{url}/metrics", timeout=60).text
                answer.pool.append(gauge(metrics, "vllm:kv_cache_usage_perc"))
                answer.resident.append(gauge(metrics, "process_resident_memory_bytes"))
                print(f"{positions}: {len(answer.texts)} tokens", flush=True)


def table(positions: str, answer: Answer) -> list[str]:
    rows = [
        f"## {positions.capitalize()}",
        "",
        "| tokens | ms between tokens | pool used % | server MB | perplexity | new words % |",
        "|---|---|---|---|---|---|",
    ]
    for number, begin in enumerate(answer.sections()):
        rows.append(
            f"| {begin + SECTION:,} | {answer.latency(begin):.2f} | "
            f"{100 * answer.pool[number]:.2f} | {answer.resident[number] / 1e6:,.0f} | "
            f"{answer.perplexity(begin):.1f} | {100 * answer.new_words(begin):.0f} |"
        )
    last = "".join(answer.texts)[-QUOTED:]
    quoted = "\n".join(f"> {line}" for line in last.split("\n"))
    return [*rows, "", f"The last {QUOTED} characters:", "", quoted, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--tokens", type=int, default=40000)
    parser.add_argument("--where", default="", help="the server's machine and command")
    options = parser.parse_args()
    kinds = ("rolling", "absolute")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda kind: generate(options.url, kind, options.tokens), kinds))
    lines = ["# One long answer", "", options.where, ""]
    for kind, answer in zip(kinds, answers, strict=True):
        lines += table(kind, answer)
    text = "\n".join(lines)
    (ROOT / "benchmarks" / "results" / "long-generation.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
