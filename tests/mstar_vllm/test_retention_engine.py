"""Bounded answers equal a Hugging Face model with the explicit mask, however they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_cases import BUDGET, PREFIX, assert_judged_right, request, verdicts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def job(model: str, policy: list[int] | None, *rounds: Any, **engine: Any) -> dict[str, Any]:
    settings = {}
    if policy is not None:
        names = ("context_budget", "protected_prefix")
        retention = {"positions": "absolute", **dict(zip(names, policy, strict=True))}
        settings = {"additional_config": {"mstar": {"retention": retention}}}
    return {"model": model, "backend": "mstar", "engine": {**settings, **engine}, "rounds": rounds}


# Chunk sizes, page sizes and batch shapes that must not show in the answers.
POLICY = [64, 20]
LENGTHS = (300, 150, 40, 83, 84)
MIX = [request(length, seed) for seed, length in enumerate(LENGTHS)]
LONG = [request(length, seed, max_tokens=512) for seed, length in enumerate(LENGTHS)]
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "chunks of 48": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "chunks of 512": {"max_num_batched_tokens": 512},
    "whole prompts": {"max_num_batched_tokens": 4096},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "a pool that preempts": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64},
    # The last one: vLLM starts no further engine in a process that has loaded numba.
    "n-gram speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        "max_num_batched_tokens": 64,
    },
}


@pytest.fixture(scope="module")
def small(tiny_model: Any) -> str:
    return str(tiny_model("llama-9-3"))


@pytest.fixture(scope="module")
def by_way(run_engines: Callable[..., list[Any]], small: str) -> dict[str, Any]:
    jobs = [job(small, POLICY, LONG, MIX, block_size=32, **engine) for engine in WAYS.values()]
    return dict(zip(WAYS, run_engines(jobs), strict=True))


@pytest.fixture(scope="module")
def judged_mix(by_way: dict[str, Any], masked_logprobs: Any, small: str) -> list[Any]:
    answers = by_way["chunks of 512"]["rounds"][0]
    cases = [
        (asked["prompt"], answer["tokens"][0], POLICY)
        for asked, answer in zip(LONG, answers, strict=True)
    ]
    return verdicts(masked_logprobs, small, 32, cases)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("again", [0, 1], ids=["cold", "warm"])
def test_answers_are_the_masked_models_however_they_were_made(
    way: str, again: int, by_way: dict[str, Any], judged_mix: list[Any]
) -> None:
    assert "rounds" in by_way[way], by_way[way]
    for answer, judged in zip(by_way[way]["rounds"][again], judged_mix, strict=True):
        assert_judged_right(answer, judged[: len(answer["tokens"][0])])


def test_the_second_round_was_served_from_the_prefix_cache(by_way: dict[str, Any]) -> None:
    warm = by_way["chunks of 512"]["rounds"][1]
    assert warm[0]["cached"] == 96, "the dense region: 84 tokens and a page, in whole pages"


def test_the_policy_changes_the_answers(
    by_way: dict[str, Any], masked_logprobs: Any, small: str
) -> None:
    answer = by_way["chunks of 512"]["rounds"][0][0]
    unmasked = verdicts(
        masked_logprobs, small, 32, [(LONG[0]["prompt"], answer["tokens"][0], None)]
    )
    with pytest.raises(AssertionError):
        assert_judged_right(answer, unmasked[0])


def test_real_models_are_exact(
    run_engines: Callable[..., list[Any]], masked_logprobs: Any, smollm2: Any, gemma3_270m: Any
) -> None:
    """SmolLM2 over 512 generated tokens; Gemma 3 behind the window of its sliding layers."""
    asked = {smollm2: request(150, 2, max_tokens=512), gemma3_270m: request(600, 1, max_tokens=64)}
    jobs = [
        job(str(model), POLICY, [each], block_size=32, max_num_batched_tokens=48)
        for model, each in asked.items()
    ]
    for (model, each), run in zip(asked.items(), run_engines(jobs), strict=True):
        assert "rounds" in run, run
        (answer,) = run["rounds"][0]
        case = (each["prompt"], answer["tokens"][0], POLICY)
        (judged,) = verdicts(masked_logprobs, str(model), 32, [case])
        assert_judged_right(answer, judged)


PAGES = (16, 64, 128)


@pytest.mark.parametrize("page", PAGES)
def test_each_page_size_is_exact(
    page: int, page_runs: dict[int, Any], masked_logprobs: Any, smollm2: Any
) -> None:
    answers = page_runs[page]["rounds"][0]
    cases = [
        (asked["prompt"], answer["tokens"][0], POLICY)
        for asked, answer in zip(MIX[:2], answers, strict=True)
    ]
    for answer, judged in zip(
        answers, verdicts(masked_logprobs, str(smollm2), page, cases), strict=True
    ):
        assert_judged_right(answer, judged)


@pytest.fixture(scope="module")
def page_runs(run_engines: Callable[..., list[Any]], smollm2: Any) -> dict[int, Any]:
    jobs = [
        job(str(smollm2), POLICY, MIX[:2], block_size=page, max_num_batched_tokens=100)
        for page in PAGES
    ]
    return dict(zip(PAGES, run_engines(jobs), strict=True))


# Requests with policies of their own beside others, on servers with and without one.
OWN = [
    request(200, 1, **{BUDGET: 48, PREFIX: 4}),
    request(200, 1),
    request(200, 1, **{BUDGET: 32, PREFIX: 40}),
    request(200, 6, **{BUDGET: 60, PREFIX: 0}),
]
OWN_POLICIES: list[list[int] | None] = [[48, 4], None, [32, 40], [60, 0]]
SERVERS: dict[str, list[int] | None] = {"unbounded server": None, "bounded server": [128, 32]}


@pytest.fixture(scope="module")
def mixed_policies(run_engines: Callable[..., list[Any]], smollm2: Any) -> dict[str, Any]:
    jobs = [
        job(str(smollm2), policy, OWN, OWN[::-1], block_size=16, max_num_batched_tokens=64)
        for policy in SERVERS.values()
    ]
    return dict(zip(SERVERS, run_engines(jobs), strict=True))


@pytest.mark.parametrize("server", SERVERS)
def test_different_policies_share_a_batch_and_a_cache_without_touching_each_other(
    server: str, mixed_policies: dict[str, Any], masked_logprobs: Any, smollm2: Any
) -> None:
    result = mixed_policies[server]
    assert "rounds" in result, result
    policies = [policy or SERVERS[server] for policy in OWN_POLICIES]
    first = result["rounds"][0]
    assert [a["tokens"] for a in result["rounds"][1]][::-1] == [a["tokens"] for a in first]
    cases = [
        (asked["prompt"], answer["tokens"][0], policy)
        for asked, answer, policy in zip(OWN, first, policies, strict=True)
    ]
    judged = verdicts(masked_logprobs, str(smollm2), 16, cases)
    for answer, verdict in zip(first, judged, strict=True):
        assert_judged_right(answer, verdict)


SHAPES = ("llama-14-2", "llama-dim80", "gemma2-cap1", "gemma3-mixed", "qwen3", "mixtral")


@pytest.fixture(scope="module")
def shape_runs(run_engines: Callable[..., list[Any]], tiny_model: Any) -> dict[str, Any]:
    jobs = [
        job(str(tiny_model(s)), POLICY, MIX[:2], block_size=16, max_num_batched_tokens=48)
        for s in SHAPES
    ]
    return dict(zip(SHAPES, run_engines(jobs), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_exact(
    shape: str, shape_runs: dict[str, Any], masked_logprobs: Any, tiny_model: Any
) -> None:
    assert "rounds" in shape_runs[shape], shape_runs[shape]
    answers = shape_runs[shape]["rounds"][0]
    cases = [
        (asked["prompt"], answer["tokens"][0], POLICY)
        for asked, answer in zip(MIX[:2], answers, strict=True)
    ]
    for answer, judged in zip(
        answers, verdicts(masked_logprobs, str(tiny_model(shape)), 16, cases), strict=True
    ):
        assert_judged_right(answer, judged)
