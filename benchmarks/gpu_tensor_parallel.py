"""Two cards against one: `gpu_tensor_parallel.py --tokens MODEL... --config FOLDER`.

`--tokens`: greedy answers over one card and over two, CUDA graphs on: of mstar, bounded by the
server and by requests of their own, with rolling positions and absolute ones, and of FLASH_ATTN
with nothing bounded, for what sums in another order do; take models with KV heads that the ranks
divide (`even_heads.py` makes one), and with ones they replicate. `--config`: a folder with a
config.json; decode speed of mstar and FLASH_ATTN on dummy weights over two cards, both engines up,
taking turns. `--one-card`: the ranks share a card, for answers where there is no second one (see
`one_card.py`). FlashInfer's all-reduce, which vLLM prefers, is left out on all sides: its kernels
are compiled for minutes the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_pipes import pipes

POLICY = {"context_budget": 192, "protected_prefix": 20, "positions": "rolling"}
RETENTION = {"mstar": {"retention": POLICY}}
OWN: tuple[dict[str, Any] | None, ...] = (
    None,
    {"mstar_positions": "absolute"},
    {"mstar_context_budget": 64, "mstar_protected_prefix": 4},
)
PLAIN_ALL_REDUCE = {"pass_config": {"fuse_allreduce_rms": False}}
SAMPLING: dict[str, Any] = {
    "max_tokens": 96,
    "temperature": 0,
    "logprobs": 2,
    "ignore_eos": True,
    "detokenize": False,
}
PAIRS_AT_ONCE = 2
POINTS = ((1, 1024), (16, 1024), (64, 1024))


class Engine:
    """An engine in a process of its own: a request a line in, an answer a line out."""

    def __init__(self, **arguments: Any) -> None:
        self.log = Path(f"/tmp/engine-{time.monotonic_ns()}.log")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={**os.environ, "VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
        )

    def ask(self, **request: Any) -> Any:
        sent, received = pipes(self.process)
        sent.write(json.dumps(request) + "\n")
        sent.flush()
        for line in received:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the engine ended: {self.log.read_text()[-3000:]}")

    def close(self) -> None:
        pipes(self.process)[0].close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def prompts() -> list[list[int]]:
    lengths = (300, 150, 40, 213)
    return [
        [(s * 7919 + i * i * 31) % 40000 + 100 for i in range(n)] for s, n in enumerate(lengths)
    ]


def two_ranks(one_card: bool) -> dict[str, Any]:
    """What asks an engine for two ranks."""
    if not one_card:
        return {"tensor_parallel_size": 2}
    from one_card import ENGINE

    return {"tensor_parallel_size": 2, **ENGINE}


def compare_tokens(model: str, backend: str, dtype: str, divided: dict[str, Any]) -> str:
    """Agreement of two ranks with one for one model; stock's tells what rounding does to it."""
    common = {
        "model": model,
        "attention_backend": backend,
        "additional_config": RETENTION if backend == "mstar" else {},
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_batched_tokens": 128,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.15,
        "cudagraph_capture_sizes": [1, 2, 4, 8],
        "compilation_config": PLAIN_ALL_REDUCE,
    }
    engines = [Engine(**common), Engine(**common, **divided)]
    try:
        with ThreadPoolExecutor() as pool:
            asked = {"do": "tokens", "bounded": backend == "mstar"}
            one, two = pool.map(lambda engine: engine.ask(**asked), engines)
    finally:
        for engine in engines:
            engine.close()
    return f"| {Path(model).name} | {backend} | {agreement(one, two)} |"


def agreement(one: list[Any], two: list[Any]) -> str:
    """Equal leading tokens, how far the log-probabilities of those differ, and the largest margin
    between the best two tokens of one card where answers part: a tie if it is no larger.
    """
    equal, total, apart, margin = 0, 0, 0.0, 0.0
    for first, second in zip(one, two, strict=True):
        total += len(first["tokens"])
        same = zip(first["tokens"], second["tokens"], strict=True)
        leading = next((i for i, (a, b) in enumerate(same) if a != b), len(first["tokens"]))
        equal += leading
        pairs = zip(first["logprobs"][:leading], second["logprobs"][:leading], strict=True)
        apart = max([apart, *(abs(a - b) for a, b in pairs)])
        margin = max([margin, *first["margins"][leading : leading + 1]])
    return f"{equal} of {total} | {apart:.4f} | {margin:.4f}"


def print_tokens(models: list[str], dtype: str, divided: dict[str, Any]) -> list[str]:
    """A table, a line a model and backend; what kept one out of it."""
    print("| model | backend | leading tokens as of one | log-probabilities apart | parted at |")
    print("|---|---|---|---|---|")
    failures = []
    with ThreadPoolExecutor(PAIRS_AT_ONCE) as pool:
        lines = {
            (model, backend): pool.submit(compare_tokens, model, backend, dtype, divided)
            for model in models
            for backend in ("FLASH_ATTN", "mstar")
        }
        for pair, line in lines.items():
            try:
                print(line.result(), flush=True)
            except RuntimeError as error:
                failures.append(f"{pair}: {error}")
    return failures


def compare_speed(config: str, turns: int, divided: dict[str, Any]) -> list[str]:
    common = {
        "model": config,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        **divided,
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.35,
        "cudagraph_capture_sizes": [1, 16, 64],
        "compilation_config": PLAIN_ALL_REDUCE,
    }
    engines = {name: Engine(**common, attention_backend=name) for name in ("FLASH_ATTN", "mstar")}
    times: dict[tuple[str, int], list[float]] = {}
    try:
        with ThreadPoolExecutor() as pool:
            first = {"do": "decode", "batch": 1, "context": 64}
            list(pool.map(lambda engine: engine.ask(**first), engines.values()))
        for turn in range(turns):
            for batch, context in POINTS:
                for name in list(engines) if turn % 2 else list(engines)[::-1]:
                    figure = engines[name].ask(do="decode", batch=batch, context=context)
                    times.setdefault((name, batch), []).append(figure)
    finally:
        for engine in engines.values():
            engine.close()
    rows = []
    for batch, context in POINTS:
        stock, ours = (times[name, batch] for name in engines)
        ratios = [s / o for s, o in zip(stock, ours, strict=True)]
        rows.append(
            f"| {batch} | {context} | {statistics.median(stock):.3f} | "
            f"{statistics.median(ours):.3f} | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return rows


class Side:
    """The engine's side of the pipe."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm: Any = LLM(**{"dtype": "bfloat16", **arguments})
        self.seed = 0

    def tokens(self, bounded: bool) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        asked = [
            (prompt, SamplingParams(**SAMPLING, extra_args=own))
            for own in (OWN if bounded else (None,))
            for prompt in prompts()
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked],
            [params for _, params in asked],
            use_tqdm=False,
        )
        return [told(one.outputs[0]) for one in outputs]

    def decode(self, batch: int, context: int) -> float:
        """Milliseconds between tokens: a long answer less a short one."""
        self.seed += 1
        short, long = (self._seconds(batch, context, tokens) for tokens in (4, 132))
        return 1000 * (long - short) / 128

    def _seconds(self, batch: int, context: int, tokens: int) -> float:
        import numpy as np
        from vllm import SamplingParams

        dice = np.random.default_rng(self.seed)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [
            {"prompt_token_ids": dice.integers(10, 100000, context).tolist()} for _ in range(batch)
        ]
        started = time.perf_counter()
        self.llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - started


def told(answer: Any) -> dict[str, list[Any]]:
    best = [
        sorted((one.logprob for one in step.values()), reverse=True) for step in answer.logprobs
    ]
    chosen = zip(answer.token_ids, answer.logprobs, strict=True)
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [step[token].logprob for token, step in chosen],
        "margins": [first - second for first, second, *_ in best],
    }


def serve(arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side(arguments)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(side, request.pop("do"))(**request)
        print(f"answer {json.dumps(answer)}", file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", default=[], metavar="MODEL")
    parser.add_argument("--dtype", default="auto", help="of --tokens")
    parser.add_argument("--config", metavar="FOLDER")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--one-card", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(json.loads(options.engine))
        return
    if options.one_card and options.config:
        parser.error("--one-card times nothing: leave out --config")
    divided = two_ranks(options.one_card)
    failures = print_tokens(options.tokens, options.dtype, divided) if options.tokens else []
    if options.config:
        print("| batch | context | FLASH_ATTN ms | mstar ms | speed | range |")
        print("|---|---|---|---|---|---|")
        try:
            print(*compare_speed(options.config, options.turns, divided), sep="\n", flush=True)
        except RuntimeError as error:
            failures.append(f"{options.config}: {error}")
    sys.exit("\n".join(failures) or None)


if __name__ == "__main__":
    main()
