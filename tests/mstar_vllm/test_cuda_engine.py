"""Engines on a card: stock answers where nothing is bounded, the masked model's where it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA card", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STOCK = {"flash_attn": "FLASH_ATTN", "flashinfer": "FLASHINFER"}
POLICY = [64, 20]
ROLLING = [64, 20, "rolling"]
OWN = {"mstar_context_budget": 48, "mstar_protected_prefix": 20}
CARD = {
    "dtype": "float16",
    "enforce_eager": False,
    # Starts in a third of the time; one way of serving below is compiled.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    # Measured memory would be wrong beside another engine on the card.
    "kv_cache_memory_bytes": 2**30,
    "gpu_memory_utilization": 0.1,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "max_num_seqs": 8,
}
EAGER = {**CARD, "enforce_eager": True}
TWO_CARDS = torch.cuda.device_count() > 1
MAY_SHARE = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNNERS = {"second runner": "1", "first runner": "0"}


def tokens(length: int, seed: int) -> list[int]:
    """Token ids without a pattern, the same in every run."""
    return [(seed * 7919 + i * i * 31 + i * 17) % 40000 + 100 for i in range(length)]


def request(length: int, seed: int, own: dict[str, Any] | None = None) -> dict[str, Any]:
    sampling = {
        "max_tokens": 64,
        "temperature": 0.0,
        "logprobs": 0,
        "ignore_eos": True,
        "extra_args": own,
    }
    return {"prompt": tokens(length, seed), "sampling": sampling}


ROUND = [request(300, 1), request(150, 2), request(40, 3), request(83, 4), request(84, 5)]
MANY = [request(20 + 5 * number, number) for number in range(64)]
OWN_ROUND = [request(300, 1, OWN), request(150, 2), request(83, 4, OWN)]


def job(
    model: Any, kernels: str, policy: list[Any] | None, requests: Any, **engine: Any
) -> dict[str, Any]:
    settings: dict[str, Any] = {"kernels": kernels}
    if policy is not None:
        names = ("context_budget", "protected_prefix", "positions")
        settings["retention"] = {"positions": "absolute", **dict(zip(names, policy, strict=False))}
    engine = {**CARD, "additional_config": {"mstar": settings}, **engine}
    return {"model": str(model), "backend": "mstar", "engine": engine, "rounds": [requests]}


def stock(model: Any, kernels: str, requests: Any, **engine: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "backend": STOCK[kernels],
        "engine": {**CARD, **engine},
        "rounds": [requests],
    }


WAYS: dict[str, dict[str, Any]] = {
    "eager": {**EAGER, "block_size": 16, "max_num_batched_tokens": 2048},
    "graphs, chunks of 64": {"block_size": 16, "max_num_batched_tokens": 64},
    "compiled, chunks of 512": {
        "block_size": 16,
        "max_num_batched_tokens": 512,
        "compilation_config": {},
    },
    "pages of 64": {"block_size": 64, "max_num_batched_tokens": 512},
    "pages of 128": {"block_size": 128, "max_num_batched_tokens": 2048},
    "one at a time": {"block_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 256},
    "a pool that preempts": {
        "block_size": 16,
        "num_gpu_blocks_override": 50,
        "max_num_batched_tokens": 64,
    },
    "memory measured at the start": {"block_size": 16, "kv_cache_memory_bytes": None},
    "n-gram speculation": {
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    },
}


@pytest.fixture(scope="module")
def judge(masked_logprobs: Any, smollm2: Any) -> Callable[..., list[Any]]:
    def judged(
        requests: list[Any], answers: list[Any], policies: list[Any], page: int = 16
    ) -> list[Any]:
        return masked_logprobs(
            [
                {
                    "model": str(smollm2),
                    "tokens": asked["prompt"] + answer["tokens"][0],
                    "start": len(asked["prompt"]),
                    "page": page,
                    "policy": policy,
                }
                for asked, answer, policy in zip(requests, answers, policies, strict=True)
            ]
        )

    return judged


def deviations(answers: list[Any], judged: list[Any]) -> list[float]:
    """How far each chosen token's log-probability is from the float32 model's."""
    return [
        abs(logprob - expected)
        for answer, verdict in zip(answers, judged, strict=True)
        for logprob, (_, _, expected) in zip(answer["logprobs"][0], verdict, strict=True)
    ]


def mistakes(answers: list[Any], judged: list[Any], tie: float) -> int:
    """Tokens that the float32 model does not choose, though its choice is clear."""
    return sum(
        token != choice and margin > tie
        for answer, verdict in zip(answers, judged, strict=True)
        for token, (choice, margin, _) in zip(answer["tokens"][0], verdict, strict=True)
    )


@pytest.fixture(scope="module", params=STOCK)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rounding(kernels: str, run_engines: Any, smollm2: Any, judge: Any) -> tuple[str, Any, float]:
    """The stock backend's answers and its largest deviation from full attention in float32."""
    (result,) = run_engines([stock(smollm2, kernels, ROUND, block_size=16)])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    worst = max(deviations(answers, judge(ROUND, answers, [None] * len(ROUND))))
    print(f"{kernels}: stock deviates by {worst:.2e}")
    return kernels, answers, worst


@pytest.fixture(scope="module")
def unbounded(rounding: Any, run_engines: Any, smollm2: Any) -> list[Any]:
    kernels = rounding[0]
    jobs = [job(smollm2, kernels, None, ROUND, block_size=16)]
    jobs.append(job(smollm2, kernels, None, ROUND, **EAGER, block_size=16))
    jobs.append(stock(smollm2, kernels, ROUND, **EAGER, block_size=16))
    return list(run_engines(jobs))


def test_unbounded_answers_are_the_stock_backends(rounding: Any, unbounded: list[Any]) -> None:
    graphs, eager, stock_eager = unbounded
    assert graphs.get("rounds") == [rounding[1]], graphs.get("error")
    assert eager == stock_eager


@pytest.mark.parametrize("way", WAYS)
def test_bounded_answers_are_the_masked_models(
    way: str, rounding: Any, run_engines: Any, smollm2: Any, judge: Any
) -> None:
    (result,) = run_engines([job(smollm2, rounding[0], POLICY, ROUND, **WAYS[way])])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    judged = judge(ROUND, answers, [POLICY] * len(ROUND), WAYS[way]["block_size"])
    worst = max(deviations(answers, judged))
    print(f"{rounding[0]}, {way}: deviates by {worst:.2e}")
    assert worst < 3 * rounding[2]
    assert mistakes(answers, judged, tie=3 * rounding[2]) == 0
    full = judge(ROUND, answers, [None] * len(ROUND))
    assert max(deviations(answers, full)) > 10 * worst, "the policy must show"


def test_sixty_four_requests_at_once(
    rounding: Any, run_engines: Any, smollm2: Any, judge: Any
) -> None:
    engine = {"max_num_seqs": 64, "cudagraph_capture_sizes": [16, 64], "block_size": 16}
    (result,) = run_engines([job(smollm2, rounding[0], POLICY, MANY, **engine)])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    judged = judge(MANY, answers, [POLICY] * len(MANY))
    assert max(deviations(answers, judged)) < 3 * rounding[2]
    assert mistakes(answers, judged, tie=3 * rounding[2]) == 0


def test_a_cache_in_eight_bits(kernels: str, run_engines: Any, smollm2: Any, judge: Any) -> None:
    eight = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "max_num_batched_tokens": 512,
    }
    jobs = [stock(smollm2, kernels, ROUND, **eight), job(smollm2, kernels, POLICY, ROUND, **eight)]
    plain, bounded = run_engines(jobs)
    assert "rounds" in plain and "rounds" in bounded, (plain, bounded)
    answers = plain["rounds"][0]
    allowed = 3 * max(deviations(answers, judge(ROUND, answers, [None] * len(ROUND))))
    answers = bounded["rounds"][0]
    assert max(deviations(answers, judge(ROUND, answers, [POLICY] * len(ROUND)))) < allowed


@pytest.fixture(scope="module")
def flash_rounding(run_engines: Any, smollm2: Any, judge: Any) -> float:
    """The largest deviation of stock FlashAttention from full attention in float32."""
    (result,) = run_engines([stock(smollm2, "flash_attn", ROUND, block_size=16)])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    return max(deviations(answers, judge(ROUND, answers, [None] * len(ROUND))))


@pytest.mark.parametrize("way", WAYS)
def test_rolling_answers_are_the_models(
    way: str, flash_rounding: float, run_engines: Any, smollm2: Any, judge: Any
) -> None:
    (result,) = run_engines([job(smollm2, "flash_attn", ROLLING, ROUND, **WAYS[way])])
    assert "rounds" in result, result
    answers, page = result["rounds"][0], WAYS[way]["block_size"]
    judged = judge(ROUND, answers, [ROLLING] * len(ROUND), page)
    worst = max(deviations(answers, judged))
    print(f"rolling, {way}: deviates by {worst:.2e}")
    assert worst < 3 * flash_rounding
    assert mistakes(answers, judged, tie=3 * flash_rounding) == 0
    absolute = judge(ROUND, answers, [POLICY] * len(ROUND), page)
    assert max(deviations(answers, absolute)) > 5 * worst, "the positions must show"


@pytest.mark.parametrize("runner", RUNNERS)
def test_requests_choose_their_positions(
    runner: str, flash_rounding: float, run_engines: Any, smollm2: Any, judge: Any
) -> None:
    still = {"mstar_positions": "absolute"}
    requests = [request(300, 1, still), request(300, 1), request(200, 2, OWN), request(150, 3)]
    asked = job(smollm2, "flash_attn", ROLLING, requests, block_size=16)
    (result,) = run_engines([asked], VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    own = [OWN["mstar_context_budget"], OWN["mstar_protected_prefix"], "rolling"]
    judged = judge(requests, answers, [POLICY, ROLLING, own, ROLLING])
    assert max(deviations(answers, judged)) < 3 * flash_rounding


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("server", [None, POLICY], ids=["no server policy", "server policy"])
def test_requests_bring_their_own_policies(
    runner: str, server: Any, rounding: Any, run_engines: Any, smollm2: Any, judge: Any
) -> None:
    asked = job(smollm2, rounding[0], server, OWN_ROUND, block_size=16)
    (result,) = run_engines([asked], VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner])
    assert "rounds" in result, result
    answers = result["rounds"][0]
    own = [OWN["mstar_context_budget"], OWN["mstar_protected_prefix"]]
    judged = judge(OWN_ROUND, answers, [own, server, own])
    assert max(deviations(answers, judged)) < 3 * rounding[2]


SHAPES = ("llama-14-2", "llama-5-1", "gemma3-mixed", "gpt-oss-sinks", "gemma2-cap1")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_answers_as_stock_flash_attention_does(
    shape: str, run_engines: Any, tiny_model: Any
) -> None:
    requests = [request(90, 1), request(33, 2), request(7, 3)]
    model = tiny_model(shape)
    stock_job = stock(model, "flash_attn", requests, dtype="bfloat16")
    ours = job(model, "flash_attn", None, requests, dtype="bfloat16")
    first, second = run_engines([stock_job, ours])
    if "error" in first:
        assert "error" in second
    else:
        assert second == first


def test_a_card_that_lags_changes_no_answer(
    kernels: str, run_engines: Any, tiny_model: Any
) -> None:
    model, lag = tiny_model("llama-14-2"), {"worker_cls": "lagging_worker.LaggingWorker"}
    chunks = {"max_num_batched_tokens": 64, "block_size": 16}
    plain, stock_lagging, lagging, bounded, lagging_bounded = run_engines(
        [
            stock(model, kernels, ROUND, **chunks),
            stock(model, kernels, ROUND, **chunks, **lag),
            job(model, kernels, None, ROUND, **chunks, **lag),
            job(model, kernels, POLICY, ROUND, **chunks),
            job(model, kernels, POLICY, ROUND, **chunks, **lag),
        ]
    )
    assert "rounds" in plain and "rounds" in bounded, (plain, bounded)
    if kernels == "flashinfer":
        assert stock_lagging != plain, "the lag must do what mstar guards against"
    assert lagging == plain
    assert lagging_bounded == bounded


@pytest.mark.skipif(
    not (TWO_CARDS or MAY_SHARE), reason="needs two CUDA cards, or one shared as in one_card.py"
)
@pytest.mark.parametrize("model", ["llama-14-2", "mixtral"])
def test_a_rank_without_requests_goes_on(model: str, run_engines: Any, tiny_model: Any) -> None:
    """Ranks of a mixture of experts step together: the idle one with made-up batches."""
    asked = [request(300, 1), request(83, 4)]
    for one in asked:
        one["sampling"]["detokenize"] = False
    both = [[{**one, "rank": rank} for one in asked] for rank in (0, 0, 1)]
    engine = {"data_parallel_size": 2, "block_size": 16, "skip_tokenizer_init": True}
    path = os.environ.get("PYTHONPATH", "")
    if not TWO_CARDS:
        engine["worker_cls"] = "one_card.OneCardWorker"
        path = f"{BENCHMARKS}:{path}"
    parallel = {**job(tiny_model(model), "flash_attn", POLICY, [], **engine), "async": True}
    (result,) = run_engines([{**parallel, "rounds": both}], PYTHONPATH=path)
    assert "rounds" in result, result
    busy, again, idle = ([one["tokens"] for one in answers] for answers in result["rounds"])
    assert busy == again == idle
