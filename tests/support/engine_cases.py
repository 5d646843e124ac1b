"""What the tests of bounded engines share: requests, and the judgement of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

BUDGET, PREFIX = "mstar_context_budget", "mstar_protected_prefix"
TIE = 2e-4


def tokens(length: int, seed: int) -> list[int]:
    """Token ids without a pattern, the same in every run."""
    return [(seed * 7919 + i * i * 31 + i * 17) % 40000 + 100 for i in range(length)]


def request(length: int, seed: int, max_tokens: int = 48, **extra: Any) -> dict[str, Any]:
    sampling = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": 0,
        "ignore_eos": True,
        "extra_args": extra or None,
    }
    return {"prompt": tokens(length, seed), "sampling": sampling}


def verdicts(
    judge: Callable[[list[Any]], list[Any]],
    model: str,
    page: int,
    cases: list[tuple[list[int], list[int], list[int] | None]],
) -> list[Any]:
    """Oracle jobs for (prompt, answer, policy) triples."""
    return judge(
        [
            {
                "model": model,
                "tokens": prompt + answer,
                "start": len(prompt),
                "page": page,
                "policy": policy,
            }
            for prompt, answer, policy in cases
        ]
    )


def assert_judged_right(answer: dict[str, Any], judged: list[list[float]]) -> None:
    """Every token is the masked model's choice (but for exact ties), with its log-probability."""
    for token, logprob, (choice, margin, expected) in zip(
        answer["tokens"][0], answer["logprobs"][0], judged, strict=True
    ):
        assert token == choice or margin < TIE
        assert logprob == pytest.approx(expected, abs=TIE)
