"""On a card, frames of a ring server equal Llama with the explicit mask per layer, up to what
float16 rounds.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA card", allow_module_level=True)

from frame_jobs import FRAME, HORIZON, LAYERS, NEAR, oracle_job, request

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# The yardstick of both kernels: stock FLASHINFER can be wrong where others use the card.
STOCK = "FLASH_ATTN"
KERNELS = ["flash_attn", "flashinfer"]
OTHER = [NEAR] * len(LAYERS)
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
# FlashInfer's kernels take blocks of 64 tokens at most.
LARGE = 128
LARGE_FRAMES = "frames of 128 tokens"
LARGE_MIX = [request(8, 1), request(56, 2), request(24, 3)]
LARGE_ENGINE = {"max_num_batched_tokens": 192, "kv_cache_memory_bytes": 2**29}
EIGHT_BITS = "a cache in eight bits"
# FlashAttention writes nothing but bfloat16 from such a cache.
EIGHT = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
FIRST_RUNNER = "first runner"
STREAMED = "a stream of eight horizons"
STREAM = request(1, 6, max_tokens=8 * HORIZON)
PROMPTS = {STREAMED: [STREAM], LARGE_FRAMES: LARGE_MIX}
POOL_OF_ONE = {"num_gpu_blocks_override": 1 + SESSION_PAGES}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Answers of one way, what the float32 model says of them under the rings and under others, and
    how far stock FlashAttention is from it where every frame is seen.
    """

    answers: list[Any]
    judged: list[Any]
    other: list[Any]
    rounding: float


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


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job(
    model: str, kernels: str, rounds: list[Any], frame: int = FRAME, **engine: Any
) -> dict[str, Any]:
    layers = [{"ring_buckets": b, "pinned_dilation": d} for b, d in LAYERS]
    ring = {"tokens_per_frame": frame, "layers": layers}
    settings = {"additional_config": {"mstar": {"kernels": kernels, "ring": ring}}}
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
    """What came out of each way of serving: `Judged`, or an error."""
    stream = job(frame_model, kernels, [[STREAM]], **POOL_OF_ONE)
    large = job(frame_model, kernels, [LARGE_MIX], LARGE, **LARGE_ENGINE)
    eight = job(frame_model, kernels, [MIX], **EIGHT)
    jobs = [job(frame_model, kernels, [MIX], **engine) for engine in WAYS.values()]
    stock = {"model": plain_model, "backend": STOCK, "engine": CARD, "rounds": [MIX]}
    stock_eight = {**stock, "engine": {**CARD, **EIGHT}}
    free, free_eight, *results = run_engines([stock, stock_eight, stream, large, eight, *jobs])
    assert "rounds" in free and "rounds" in free_eight, (free, free_eight)
    first = run_engines([job(frame_model, kernels, [MIX])], VLLM_USE_V2_MODEL_RUNNER="0")
    ways = [STREAMED, LARGE_FRAMES, EIGHT_BITS, *WAYS, FIRST_RUNNER]
    found = dict(zip(ways, [*results, *first], strict=True))
    served = [way for way, result in found.items() if "rounds" in result]
    # All questions at once: the oracle is a process of its own.
    questions = [
        (PROMPTS.get(way, MIX), found[way], layers, LARGE if way == LARGE_FRAMES else FRAME)
        for way in served
        for layers in (LAYERS, OTHER)
    ]
    questions += [(MIX, result, EVERYTHING, FRAME) for result in (free, free_eight)]
    verdicts = iter(masked_frames([one for each in questions for one in asked(frame_model, *each)]))
    judged = [[next(verdicts) for _ in prompts] for prompts, *_ in questions]
    *judged, plain, plain_eight = judged
    rounding = worst(free["rounds"][0], plain)
    rounding_eight = worst(free_eight["rounds"][0], plain_eight)
    for place, way in enumerate(served):
        found[way] = Judged(
            answers=found[way]["rounds"][0],
            judged=judged[2 * place],
            other=judged[2 * place + 1],
            rounding=rounding_eight if way == EIGHT_BITS else rounding,
        )
    return found


def asked(
    model: str, prompts: list[Any], result: Any, layers: list[list[int]], frame: int
) -> list[Any]:
    pairs = zip(prompts, result["rounds"][0], strict=True)
    return [oracle_job(model, *pair, layers, frame) for pair in pairs]


def worst(answers: list[Any], judged: list[Any]) -> float:
    """How far a chosen token's log-probability is from the float32 model's, at most."""
    return max(
        abs(logprob - expected)
        for answer, verdict in zip(answers, judged, strict=True)
        for logprob, (_, _, expected) in zip(answer["logprobs"][0], verdict, strict=True)
    )


def assert_judged_right(way: str, found: Judged) -> None:
    deviation = worst(found.answers, found.judged)
    print(f"{way}: deviates by {deviation:.2e}, stock by {found.rounding:.2e}")
    assert deviation < 3 * found.rounding
    for answer, verdict in zip(found.answers, found.judged, strict=True):
        for token, (choice, margin, _) in zip(answer["tokens"][0], verdict, strict=True):
            assert token == choice or margin < 3 * found.rounding


@pytest.mark.parametrize("way", [*WAYS, LARGE_FRAMES, FIRST_RUNNER])
def test_frames_are_the_masked_models(way: str, kernels: str, by_way: dict[str, Any]) -> None:
    found = by_way[way]
    assert isinstance(found, Judged), found
    assert_judged_right(f"{kernels}, {way}", found)
    assert worst(found.answers, found.other) > 10 * found.rounding, "the rings must show"


def test_a_cache_in_eight_bits_deviates_as_stocks_does(
    kernels: str, by_way: dict[str, Any]
) -> None:
    found = by_way[EIGHT_BITS]
    assert isinstance(found, Judged), found
    deviation, other = worst(found.answers, found.judged), worst(found.answers, found.other)
    print(
        f"{kernels}, {EIGHT_BITS}: {deviation:.2e}, stock {found.rounding:.2e}, other {other:.2e}"
    )
    assert deviation < 3 * found.rounding and deviation < other / 3


def test_eight_horizons_fit_in_the_pages_of_one_session(
    kernels: str, by_way: dict[str, Any]
) -> None:
    found = by_way[STREAMED]
    assert isinstance(found, Judged), found
    assert len(found.answers[0]["tokens"][0]) == 8 * HORIZON == 8 * 4 * 4 * FRAME
    assert_judged_right(f"{kernels}, {STREAMED}", found)
