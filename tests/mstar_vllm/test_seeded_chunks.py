"""A seeded answer is the same however its prompt is cut into chunks, and ends nobody's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_cases import tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = (16, 512)
SAMPLED = {"max_tokens": 16, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
GREEDY = {**SAMPLED, "temperature": 0.0}


ROUND = [
    {"prompt": tokens(700, 1), "sampling": {**SAMPLED, "seed": 1}},
    {"prompt": tokens(41, 2), "sampling": GREEDY},
    {"prompt": tokens(190, 3), "sampling": {**SAMPLED, "seed": 2, "n": 2, "top_p": 0.9}},
]


def job(model: str, backend: str, chunk: int) -> dict[str, Any]:
    engine = {"max_num_batched_tokens": chunk, "max_num_seqs": 4, "max_model_len": 1024}
    return {"model": model, "backend": backend, "engine": engine, "rounds": [ROUND]}


@pytest.fixture(scope="module")
def answers(
    run_engines: Callable[..., list[Any]], tiny_model: Callable[[str], Any]
) -> dict[tuple[str, int], Any]:
    """The stock backend serves the uncut prompts, and fails on cut ones: that one comes last."""
    model = str(tiny_model("llama-9-3"))
    asked = [("CPU_ATTN", 1024), *(("mstar", chunk) for chunk in CHUNKS), ("CPU_ATTN", 64)]
    jobs = [job(model, backend, chunk) for backend, chunk in asked]
    return dict(zip(asked, run_engines(jobs), strict=True))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_seeded_answer_does_not_depend_on_the_chunk_size(
    chunk: int, answers: dict[tuple[str, int], Any]
) -> None:
    whole = answers["CPU_ATTN", 1024]["rounds"][0]
    cut = answers["mstar", chunk]
    assert "rounds" in cut, cut
    for mine, uncut in zip(cut["rounds"][0], whole, strict=True):
        assert mine["tokens"] == uncut["tokens"]
        for ours, theirs in zip(mine["logprobs"], uncut["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)


def test_the_stock_runner_still_needs_the_hook(answers: dict[tuple[str, int], Any]) -> None:
    """Once this fails, the hook on `sample_tokens` can go."""
    assert "CPU Generator does not use offset" in answers["CPU_ATTN", 64].get("error", "")
