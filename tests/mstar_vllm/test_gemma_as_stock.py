"""A real model with sliding windows answers as on the stock backend, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = {"max_tokens": 16, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def answers(
    run_engines: Callable[..., list[Any]], gemma3_270m: Path
) -> dict[tuple[str, bool], Any]:
    """Gemma 3 270M on real text within and beyond its sliding window of 512 tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(gemma3_270m / "tokenizer.json")).encode(TEXT.read_text()).ids
    assert len(ids) > 1200
    asked = [{"prompt": ids[:length], "sampling": GREEDY} for length in (40, 500, 700, 1200)]
    sides = [(backend, off) for off in (False, True) for backend in ("CPU_ATTN", "mstar")]
    jobs = [
        {
            "model": str(gemma3_270m),
            "backend": backend,
            "engine": {"disable_hybrid_kv_cache_manager": off},
            "rounds": [asked],
        }
        for backend, off in sides
    ]
    return dict(zip(sides, run_engines(jobs), strict=True))


@pytest.mark.parametrize("hybrid_manager_off", [False, True])
def test_prompts_beyond_the_window_are_answered_as_on_the_stock_backend(
    hybrid_manager_off: bool, answers: dict[tuple[str, bool], Any]
) -> None:
    stock, ours = (answers[backend, hybrid_manager_off] for backend in ("CPU_ATTN", "mstar"))
    assert "rounds" in stock, stock
    assert ours == stock
    assert len({tuple(one["tokens"][0]) for one in ours["rounds"][0]}) == 4
