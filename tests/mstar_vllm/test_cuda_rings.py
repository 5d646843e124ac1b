"""On a card, frames of a ring server equal Llama with the explicit mask per layer, up to what
float16 rounds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA card", allow_module_level=True)

from frame_jobs import FRAME, HORIZON, LAYERS, NEAR, oracle_job, request

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STOCK = {"flash_attn": "FLASH_ATTN", "flashinfer": "FLASHINFER"}
EVERYTHING = [[1000, 1]] * len(LAYERS)
# Sessions at clocks from 1 to 25 in one batch; some prompts are longer than the horizon.
MIX = [request(1, 1), request(25, 2), request(4, 3), request(9, 4), request(17, 5)]
SESSION_PAGES = 3 * 8 + 5 + 4
CARD = {
    "dtype": "float16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0},
    "kv_cache_memory_bytes": 2**28,
    "gpu_memory_utilization": 0.1,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 8192,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs, chunks of 64": {},
    "eager, chunks of 17": {"enforce_eager": True, "max_num_batched_tokens": 17},
    "compiled, chunks of 48": {"compilation_config": {}, "max_num_batched_tokens": 48},
    "one at a time": {"max_num_seqs": 1},
    "room for two sessions": {"num_gpu_blocks_override": 1 + 2 * SESSION_PAGES},
    "n-gram speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
        "max_num_batched_tokens": 48,
    },
}
STREAM = request(1, 6, max_tokens=8 * HORIZON)
POOL_OF_ONE = {"num_gpu_blocks_override": 1 + SESSION_PAGES}


@pytest.fixture(scope="module")
def plain_model(frame_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The frame decoder's weights as a Llama model without rings."""
    folder = tmp_path_factory.mktemp("plain") / "llama"
    shutil.copytree(frame_model, folder)
    config = json.loads((Path(frame_model) / "config.json").read_text())
    del config["mstar"]
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module", params=STOCK)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job(model: str, kernels: str, rounds: list[Any], **engine: Any) -> dict[str, Any]:
    settings = {"additional_config": {"mstar": {"kernels": kernels}}}
    return {
        "model": model,
        "backend": "mstar",
        "engine": {**CARD, **settings, **engine},
        "rounds": rounds,
    }


@pytest.fixture(scope="module")
def by_way(
    kernels: str, run_engines: Any, frame_model: str, plain_model: str, masked_frames: Any
) -> dict[str, Any]:
    jobs = [job(frame_model, kernels, [MIX], **engine) for engine in WAYS.values()]
    jobs.append(job(frame_model, kernels, [[STREAM]], **POOL_OF_ONE))
    stock = {"model": plain_model, "backend": STOCK[kernels], "engine": CARD, "rounds": [MIX]}
    *results, plain = run_engines([*jobs, {**stock, "rounds": [MIX]}])
    assert "rounds" in plain, plain
    (first_runner,) = run_engines([job(frame_model, kernels, [MIX])], VLLM_USE_V2_MODEL_RUNNER="0")
    answers = plain["rounds"][0]
    pairs = zip(MIX, answers, strict=True)
    judged = masked_frames([oracle_job(frame_model, *pair, EVERYTHING) for pair in pairs])
    found = dict(zip([*WAYS, "stream"], results, strict=True))
    return {**found, "first runner": first_runner, "rounding": worst(answers, judged)}


def worst(answers: list[Any], judged: list[Any]) -> float:
    """How far a chosen token's log-probability is from the float32 model's, at most."""
    return max(
        abs(logprob - expected)
        for answer, verdict in zip(answers, judged, strict=True)
        for logprob, (_, _, expected) in zip(answer["logprobs"][0], verdict, strict=True)
    )


def assert_judged_right(answers: list[Any], judged: list[Any], rounding: float, way: str) -> None:
    deviation = worst(answers, judged)
    print(f"{way}: deviates by {deviation:.2e}, stock by {rounding:.2e}")
    assert deviation < 3 * rounding
    for answer, verdict in zip(answers, judged, strict=True):
        for token, (choice, margin, _) in zip(answer["tokens"][0], verdict, strict=True):
            assert token == choice or margin < 3 * rounding


@pytest.mark.parametrize("way", [*WAYS, "first runner"])
def test_frames_are_the_masked_models(
    way: str, kernels: str, by_way: dict[str, Any], masked_frames: Any, frame_model: str
) -> None:
    assert "rounds" in by_way[way], by_way[way]
    answers = by_way[way]["rounds"][0]
    pairs = list(zip(MIX, answers, strict=True))
    judged = masked_frames([oracle_job(frame_model, *pair, LAYERS) for pair in pairs])
    assert_judged_right(answers, judged, by_way["rounding"], f"{kernels}, {way}")
    other = masked_frames([oracle_job(frame_model, *pair, [NEAR] * 4) for pair in pairs])
    assert worst(answers, other) > 10 * by_way["rounding"], "the rings must show"


def test_eight_horizons_fit_in_the_pages_of_one_session(
    kernels: str, by_way: dict[str, Any], masked_frames: Any, frame_model: str
) -> None:
    assert "rounds" in by_way["stream"], by_way["stream"]
    answers = by_way["stream"]["rounds"][0]
    assert len(answers[0]["tokens"][0]) == 8 * HORIZON == 8 * 4 * 4 * FRAME
    judged = masked_frames([oracle_job(frame_model, STREAM, answers[0], LAYERS)])
    assert_judged_right(answers, judged, by_way["rounding"], f"{kernels}, stream")
