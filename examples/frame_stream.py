"""Stream frames from a served token world model, for far longer than its rings reach.

    python scripts/frame_model.py
    make serve MODEL=.models/tiny/frame-decoder ARGS='--max-num-batched-tokens 64 \\
        --max-num-seqs 8 --max-model-len 131072 --num-gpu-blocks-override 100'
    python examples/frame_stream.py --frames 400

Shows every frame as a row of shades, how long one took so far, and how much of the server's KV
pool is in use: neither grows. The weights are random, so the pictures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import urllib.request
from collections.abc import Iterator

from openai import OpenAI

URL = os.environ.get("MSTAR_URL", "http://127.0.0.1:8000/v1")
TOKENS_PER_FRAME = 16
VOCABULARY = 256
SHADES = " .:-=+*#%@"


def stream_tokens(first_frame: list[int], num_tokens: int, seed: int) -> Iterator[int]:
    """The tokens that follow `first_frame`, as they come."""
    client = OpenAI(base_url=URL, api_key="none")
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=first_frame,
        max_tokens=num_tokens,
        temperature=1.0,
        seed=seed,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            yield from (choice.model_extra or {}).get("token_ids") or ()


def frames_of(tokens: Iterator[int]) -> Iterator[list[int]]:
    frame: list[int] = []
    for token in tokens:
        frame.append(token)
        if len(frame) == TOKENS_PER_FRAME:
            yield frame
            frame = []


def pool_usage() -> float:
    """Share of the server's KV pool that is in use."""
    with urllib.request.urlopen(URL.removesuffix("/v1") + "/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.search(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def shaded(frame: list[int]) -> str:
    return "".join(SHADES[token * len(SHADES) // VOCABULARY] for token in frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    first_frame = [(arguments.seed * 97 + i * 31) % VOCABULARY for i in range(TOKENS_PER_FRAME)]
    tokens = stream_tokens(first_frame, arguments.frames * TOKENS_PER_FRAME, arguments.seed)
    began = time.perf_counter()
    for number, frame in enumerate(frames_of(tokens), start=1):
        print(f"{number:6d} |{shaded(frame)}|", end="", flush=True)
        if number % 50 == 0:
            spent = 1000 * (time.perf_counter() - began) / number
            print(f" {spent:.1f} ms a frame, pool {pool_usage():.1%}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
