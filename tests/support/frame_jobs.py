"""Sessions of the tiny frame decoder, and what its oracle is asked about them."""

from __future__ import annotations

from typing import Any

FRAME = 16
NEAR, FAR = [4, 1], [4, 4]
LAYERS = [NEAR, FAR, NEAR, NEAR]
HORIZON = 4 * 4 * FRAME


def request(frames: int, seed: int, max_tokens: int = 80) -> dict[str, Any]:
    """A prompt of whole frames without a pattern, the same in every run."""
    prompt = [(seed * 7919 + i * i * 31 + i * 17) % 256 for i in range(frames * FRAME)]
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    return {"prompt": prompt, "sampling": sampling}


def oracle_job(
    model: str,
    asked: dict[str, Any],
    answer: dict[str, Any],
    layers: list[list[int]],
    frame: int = FRAME,
) -> dict[str, Any]:
    return {
        "model": model,
        "tokens": asked["prompt"] + answer["tokens"][0],
        "start": len(asked["prompt"]),
        "frame": frame,
        "layers": layers,
    }
