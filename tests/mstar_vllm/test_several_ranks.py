"""Several ranks: heads divided or replicated, policies known to all, an idle rank that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import BUDGET, PREFIX, request

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# KV heads that two ranks divide, and one that both hold; random weights and real ones.
MODELS = ("llama-14-2", "llama-4-1", "SmolLM2 with even heads", "Gemma 3 270M")
OWN = {BUDGET: 48, PREFIX: 20}
POLICIES: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "retention": {"context_budget": 64, "protected_prefix": 20, "positions": "absolute"},
    "rolling": {"context_budget": 64, "protected_prefix": 20, "positions": "rolling"},
}


def asked(length: int, seed: int, **own: int) -> dict[str, Any]:
    made = request(length, seed, **own)
    made["sampling"]["detokenize"] = False
    return made


ROUND = [asked(300, 1), asked(83, 2), asked(150, 3, **OWN)]


def job(model: Any, policy: str, rounds: list[Any], **engine: Any) -> dict[str, Any]:
    retention = POLICIES[policy]
    settings = {} if retention is None else {"retention": retention}
    engine = {
        "block_size": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 256,
        "skip_tokenizer_init": True,
        "additional_config": {"mstar": settings},
        **engine,
    }
    return {"model": str(model), "backend": "mstar", "engine": engine, "rounds": rounds}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, script: Callable[[str], Any]) -> Path:
    found: Path
    if request.param == "SmolLM2 with even heads":
        smollm2 = request.getfixturevalue("smollm2")
        found = script("even_heads").build(smollm2, tmp_path / "model")
    elif request.param == "Gemma 3 270M":
        found = request.getfixturevalue("gemma3_270m")
    else:
        found = request.getfixturevalue("tiny_model")(request.param)
    return found


def test_two_ranks_answer_as_one(folder: Path, run_engines: Callable[..., list[Any]]) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    alone = [job(folder, policy, [ROUND]) for policy in POLICIES]
    together = [job(folder, policy, [ROUND], **ranks) for policy in POLICIES]
    for one, two in zip(run_engines(alone), run_engines(together), strict=True):
        assert "rounds" in one and "rounds" in two, (one, two)
        for first, second in zip(one["rounds"][0], two["rounds"][0], strict=True):
            assert second["tokens"] == first["tokens"]
            assert second["logprobs"][0] == pytest.approx(first["logprobs"][0], abs=1e-4)


def test_a_rank_without_requests_goes_on(
    run_engines: Callable[..., list[Any]], tiny_model: Any
) -> None:
    """Ranks of a dense model; a mixture of experts needs a card: test_cuda_engine.py."""
    rounds = [[{**one, "rank": rank} for one in ROUND] for rank in (0, 0, 1)]
    parallel = job(tiny_model("llama-14-2"), "retention", rounds, data_parallel_size=2)
    (result,) = run_engines([{**parallel, "async": True}])
    assert "rounds" in result, result
    busy, again, idle = ([one["tokens"] for one in answers] for answers in result["rounds"])
    assert busy == again == idle
