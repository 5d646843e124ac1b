"""Random load on a running server: `python benchmarks/stress.py URL [--seconds N] [--clients N]`.

Clients send greedy requests of random lengths with random policies of their own; some hang up
half-way. Afterwards every kind of request that was answered runs once more alone: the answers must
be equal, nothing may have failed with 5xx, and the pool must be empty again. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

SENTENCES = (
    "The lighthouse keeper walked down to the shore and counted the boats. ",
    "Every morning the baker lit the oven before the town was awake. ",
    "A river that forgets its source still finds the sea in the end. ",
    "The clock in the station had stopped, and nobody seemed to mind. ",
)
POLICIES: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"mstar_context_budget": 48},
    {"mstar_context_budget": 96, "mstar_protected_prefix": 24},
    {"mstar_context_budget": 32, "mstar_protected_prefix": "prompt"},
)


@dataclass(frozen=True)
class Kind:
    """A request that can be repeated: the same kind must always get the same answer."""

    prompt: str
    policy: int
    tokens: int

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "vllm_xargs": POLICIES[self.policy],
        }


@dataclass
class Outcome:
    """What the clients saw, under one lock."""

    answers: dict[Kind, set[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, kind: Kind, text: str) -> None:
        with self.lock:
            self.answers.setdefault(kind, set()).add(text)
            self.counts["finished"] += 1

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1


def random_kind(dice: random.Random, longest: int) -> Kind:
    policy = dice.randrange(len(POLICIES))
    own_prefix = (POLICIES[policy] or {}).get("mstar_protected_prefix") == "prompt"
    repeats = dice.randint(1, 3) if own_prefix else dice.randint(1, 12)
    prompt = f"{dice.randrange(4)}. " + dice.choice(SENTENCES) * repeats
    return Kind(prompt, policy, dice.choice([8, 40, 120, longest]))


def client(
    url: str, model: str, seed: int, deadline: float, kinds: list[Kind], seen: Outcome
) -> None:
    dice = random.Random(seed)
    with httpx.Client(timeout=600) as http:
        while time.monotonic() < deadline:
            kind = dice.choice(kinds)
            try:
                if dice.random() < 0.15:
                    hang_up(http, url, kind.body(model), dice.randint(1, 20))
                    seen.count("hung up")
                    continue
                answer = http.post(f"{url}/v1/completions", json=kind.body(model))
            except httpx.TransportError as error:
                seen.count(f"transport: {type(error).__name__}")
                continue
            if answer.status_code == 200:
                seen.answered(kind, answer.json()["choices"][0]["text"])
            else:
                seen.count(f"status {answer.status_code}")


def hang_up(http: httpx.Client, url: str, body: dict[str, Any], after: int) -> None:
    with http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number >= after:
                return


def usage(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.search(r"^vllm:kv_cache_usage_perc(?:{[^}]*})? (\S+)$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("vllm:kv_cache_usage_perc is not in /metrics")
    return float(found[1])


def settle(url: str, limit: float = 120.0) -> float:
    deadline = time.monotonic() + limit
    while usage(url) and time.monotonic() < deadline:
        time.sleep(0.5)
    return usage(url)


def run(
    url: str, seconds: float, clients: int, longest: int, num_kinds: int
) -> tuple[Counter[str], list[str]]:
    """Load the server; returns what the clients counted, and what was wrong."""
    dice = random.Random(num_kinds)
    kinds = [random_kind(dice, longest) for _ in range(num_kinds)]
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    seen, deadline = Outcome(), time.monotonic() + seconds
    with ThreadPoolExecutor(clients) as pool:
        futures = [
            pool.submit(client, url, model, seed, deadline, kinds, seen) for seed in range(clients)
        ]
        for future in futures:
            future.result()
    wrong = [f"{n} x {what}" for what, n in seen.counts.items() if what.startswith("status 5")]
    left = settle(url)
    if left:
        wrong.append(f"the pool is {left:.1%} full when nothing runs")
    for kind, texts in seen.answers.items():
        alone = httpx.post(f"{url}/v1/completions", json=kind.body(model), timeout=600).json()
        if texts != {alone["choices"][0]["text"]}:
            wrong.append(f"{kind} got {len(texts)} answers under load that differ from its own")
    seen.counts["kinds"] = len(seen.answers)
    return seen.counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest answers")
    parser.add_argument("--kinds", type=int, default=60, help="different requests")
    options = parser.parse_args()
    counts, wrong = run(
        options.url, options.seconds, options.clients, options.longest, options.kinds
    )
    print(", ".join(f"{what} {n}" for what, n in sorted(counts.items())))
    for line in wrong:
        print(f"wrong: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
