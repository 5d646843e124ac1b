"""Rolling positions: answers equal a model in which every pair has the distance of the rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import assert_judged_right, request, verdicts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POLICY = [64, 20, "rolling"]
LENGTHS = (300, 40, 115, 116)
MIX = [request(length, seed, max_tokens=512) for seed, length in enumerate(LENGTHS)]
AGAIN = [request(length, seed, max_tokens=40) for seed, length in enumerate(LENGTHS)]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "chunks of 48": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "whole prompts": {"max_num_batched_tokens": 4096},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "a pool that preempts": {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 64},
    "kernel blocks of 16": {"block_size": 16, "max_num_batched_tokens": 64},
    "up to the longest length": {"max_model_len": 812, "max_num_batched_tokens": 64},
    # The last one: vLLM starts no further engine in a process that has loaded numba.
    "n-gram speculation": {"speculative_config": NGRAM, "max_num_batched_tokens": 64},
}


def rolling_job(model: str, *rounds: Any, **engine: Any) -> dict[str, Any]:
    budget, prefix, positions = POLICY
    retention = {"context_budget": budget, "protected_prefix": prefix, "positions": positions}
    settings = {"additional_config": {"mstar": {"retention": retention}}}
    engine = {"block_size": 32, **engine}
    return {"model": model, "backend": "mstar", "engine": {**settings, **engine}, "rounds": rounds}


@pytest.fixture(scope="module")
def small(tiny_model: Any) -> str:
    return str(tiny_model("llama-9-3"))


@pytest.fixture(scope="module")
def by_way(run_engines: Callable[..., list[Any]], small: str) -> dict[str, Any]:
    jobs = [rolling_job(small, MIX, AGAIN, **engine) for engine in WAYS.values()]
    return dict(zip(WAYS, run_engines(jobs), strict=True))


@pytest.fixture(scope="module")
def judged_mix(by_way: dict[str, Any], masked_logprobs: Any, small: str) -> dict[int, Any]:
    found = {}
    for page, way in ((32, "whole prompts"), (16, "kernel blocks of 16")):
        assert "rounds" in by_way[way], by_way[way]
        cases = [
            (asked["prompt"], answer["tokens"][0], POLICY)
            for asked, answer in zip(MIX, by_way[way]["rounds"][0], strict=True)
        ]
        found[page] = verdicts(masked_logprobs, small, page, cases)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("again", [0, 1], ids=["cold", "warm"])
def test_answers_have_the_distances_of_the_rule_however_they_were_made(
    way: str, again: int, by_way: dict[str, Any], judged_mix: dict[int, Any]
) -> None:
    assert "rounds" in by_way[way], by_way[way]
    judged = judged_mix[WAYS[way].get("block_size", 32)]
    for answer, verdict in zip(by_way[way]["rounds"][again], judged, strict=True):
        assert_judged_right(answer, verdict[: len(answer["tokens"][0])])


def test_absolute_distances_would_give_other_answers(
    by_way: dict[str, Any], masked_logprobs: Any, small: str
) -> None:
    answer = by_way["whole prompts"]["rounds"][0][0]
    case = (MIX[0]["prompt"], answer["tokens"][0], POLICY[:2])
    absolute = verdicts(masked_logprobs, small, 32, [case])
    with pytest.raises(AssertionError):
        assert_judged_right(answer, absolute[0])


OWN = [
    request(200, 1, mstar_context_budget=48, mstar_protected_prefix=4),
    request(200, 1),
    request(200, 6, mstar_positions="absolute"),
    request(200, 6, mstar_context_budget=40, mstar_protected_prefix=20),
]
OWN_POLICIES = [[48, 4, "rolling"], POLICY, POLICY[:2], [40, 20, "rolling"]]


def test_requests_choose_their_positions_within_one_batch(
    run_engines: Callable[..., list[Any]], masked_logprobs: Any, smollm2: Path
) -> None:
    (result,) = run_engines([rolling_job(str(smollm2), OWN, OWN[::-1], max_num_batched_tokens=64)])
    assert "rounds" in result, result
    first, second = result["rounds"]
    assert [a["tokens"] for a in second][::-1] == [a["tokens"] for a in first]
    cases = [
        (asked["prompt"], answer["tokens"][0], policy)
        for asked, answer, policy in zip(OWN, first, OWN_POLICIES, strict=True)
    ]
    for answer, verdict in zip(
        first, verdicts(masked_logprobs, str(smollm2), 32, cases), strict=True
    ):
        assert_judged_right(answer, verdict)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "yarn": ("Qwen3Config", {"rope_scaling": YARN, "head_dim": 32}),
    "three quarters of a head": ("Phi3Config", {"partial_rotary_factor": 0.75}),
    "neighbouring pairs": ("CohereConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "layers without positions": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "shared windows": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
VOCABULARY = 512


@pytest.fixture(scope="module")
def scheme_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    folder = tmp_path_factory.mktemp("schemes")
    for name, (config_class, changes) in SCHEMES.items():
        config = getattr(transformers, config_class)(**{**common, **changes})
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in SCHEMES}


@pytest.fixture(scope="module")
def scheme_runs(
    run_engines: Callable[..., list[Any]], scheme_models: dict[str, Path]
) -> dict[str, Any]:
    asked = [request(200, 1), request(90, 2)]
    for each in asked:
        each["prompt"] = [token % (VOCABULARY - 10) + 5 for token in each["prompt"]]
    engine = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_model_len": 512}
    jobs = [rolling_job(str(folder), asked, **engine) for folder in scheme_models.values()]
    runs = run_engines(jobs)
    return {name: (asked, run) for name, run in zip(scheme_models, runs, strict=True)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_rotary_scheme_is_exact(
    scheme: str,
    scheme_runs: dict[str, Any],
    scheme_models: dict[str, Path],
    masked_logprobs: Any,
) -> None:
    asked, run = scheme_runs[scheme]
    assert "rounds" in run, run
    answers = run["rounds"][0]
    cases = [
        (question["prompt"], answer["tokens"][0], POLICY)
        for question, answer in zip(asked, answers, strict=True)
    ]
    judged = verdicts(masked_logprobs, str(scheme_models[scheme]), 32, cases)
    for answer, verdict in zip(answers, judged, strict=True):
        assert_judged_right(answer, verdict)


def test_a_scheme_that_depends_on_the_length_is_refused_by_name(
    run_engines: Callable[..., list[Any]], scheme_models: dict[str, Path], tmp_path: Path
) -> None:
    for file in scheme_models["three quarters of a head"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    factors = [1.0] * 12
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {"skip_tokenizer_init": True, "max_model_len": 256}
    (run,) = run_engines([rolling_job(str(tmp_path), MIX[:1], **engine)])
    assert "linear, llama3, yarn, got 'longrope'" in run["error"]
