"""Frames of a ring server equal Llama with the explicit mask per layer, however they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from frame_jobs import FAR, FRAME, HORIZON, LAYERS, NEAR, oracle_job, request

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TIE = 2e-4
# Pages a session claims for chunks of 64 tokens: 8 in each of three layers, 5 + 4 in the far one.
SESSION_PAGES = 3 * 8 + 5 + 4


def job(model: str, *rounds: Any, **engine: Any) -> dict[str, Any]:
    values = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 8192, **engine}
    return {"model": model, "backend": "mstar", "engine": values, "rounds": rounds}


def assert_judged_right(answer: dict[str, Any], judged: list[list[float]]) -> None:
    """Every token is the masked model's choice (but for exact ties), with its log-probability."""
    for token, logprob, (choice, margin, expected) in zip(
        answer["tokens"][0], answer["logprobs"][0], judged, strict=True
    ):
        assert token == choice or margin < TIE
        assert logprob == pytest.approx(expected, abs=TIE)


# Sessions at clocks from 1 to 25 in one batch; some prompts are longer than the horizon.
MIX = [request(1, 1), request(25, 2), request(4, 3), request(9, 4), request(17, 5)]
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 64": {},
    "chunks of 48": {"max_num_batched_tokens": 48},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "room for two sessions": {"num_gpu_blocks_override": 1 + 2 * SESSION_PAGES},
    "async scheduling": {"async_scheduling": True},
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


@pytest.fixture(scope="module")
def by_way(run_engines: Callable[..., list[Any]], frame_model: str) -> dict[str, Any]:
    jobs = [job(frame_model, MIX, MIX[::-1], **engine) for engine in WAYS.values()]
    return dict(zip(WAYS, run_engines(jobs), strict=True))


@pytest.fixture(scope="module")
def judged_mix(by_way: dict[str, Any], masked_frames: Any, frame_model: str) -> list[Any]:
    assert "rounds" in by_way["chunks of 64"], by_way["chunks of 64"]
    answers = by_way["chunks of 64"]["rounds"][0]
    pairs = zip(MIX, answers, strict=True)
    judged: list[Any] = masked_frames([oracle_job(frame_model, *pair, LAYERS) for pair in pairs])
    return judged


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("again", [0, 1], ids=["first", "again"])
def test_frames_are_the_masked_models_however_they_were_made(
    way: str, again: int, by_way: dict[str, Any], judged_mix: list[Any]
) -> None:
    assert "rounds" in by_way[way], by_way[way]
    answers = by_way[way]["rounds"][again]
    for answer, judged in zip(answers[::-1] if again else answers, judged_mix, strict=True):
        assert_judged_right(answer, judged)


def test_nothing_comes_from_the_prefix_cache(by_way: dict[str, Any]) -> None:
    assert all(not answer["cached"] for answer in by_way["chunks of 64"]["rounds"][1])


def test_the_rings_change_the_frames(
    by_way: dict[str, Any], masked_frames: Any, frame_model: str
) -> None:
    """Another dilation in one layer, or one bucket more, is another model."""
    answer = by_way["chunks of 64"]["rounds"][0][1]
    for layers in ([NEAR, NEAR, NEAR, NEAR], [[5, 1], FAR, NEAR, NEAR]):
        (judged,) = masked_frames([oracle_job(frame_model, MIX[1], answer, layers)])
        with pytest.raises(AssertionError):
            assert_judged_right(answer, judged)


@pytest.fixture(scope="module")
def stream(run_engines: Callable[..., list[Any]], frame_model: str) -> Any:
    """One session of twenty horizons in a pool that holds just that session."""
    asked = request(1, 6, max_tokens=20 * HORIZON)
    pool = {"num_gpu_blocks_override": 1 + SESSION_PAGES}
    (result,) = run_engines([job(frame_model, [asked], **pool)])
    assert "rounds" in result, result
    return asked, result["rounds"][0][0]


def test_twenty_horizons_fit_in_the_pages_of_one_session(
    stream: Any, masked_frames: Any, frame_model: str
) -> None:
    asked, answer = stream
    assert len(answer["tokens"][0]) == 20 * HORIZON
    (judged,) = masked_frames([oracle_job(frame_model, asked, answer, LAYERS)])
    assert_judged_right(answer, judged)


OTHER_RINGS: dict[str, list[list[int]]] = {
    "one bucket": [[1, 1]] * 4,
    "two far": [[2, 3], [2, 3], [3, 2], [2, 1]],
    "each its own": [[2, 1], [3, 2], [4, 3], [5, 4]],
}


@pytest.fixture(scope="module")
def other_rings(run_engines: Callable[..., list[Any]], frame_model: str) -> dict[str, Any]:
    jobs = []
    for layers in OTHER_RINGS.values():
        geometries = [{"ring_buckets": b, "pinned_dilation": d} for b, d in layers]
        ring = {"tokens_per_frame": FRAME, "layers": geometries}
        chunk = min(b for b, _ in layers) * FRAME
        settings = {"mstar": {"ring": ring}}
        jobs.append(job(frame_model, MIX, additional_config=settings, max_num_batched_tokens=chunk))
    return dict(zip(OTHER_RINGS, run_engines(jobs), strict=True))


@pytest.mark.parametrize("rings", OTHER_RINGS)
def test_the_operators_rings_win_over_the_models(
    rings: str, other_rings: dict[str, Any], masked_frames: Any, frame_model: str
) -> None:
    result = other_rings[rings]
    assert "rounds" in result, result
    pairs = list(zip(MIX, result["rounds"][0], strict=True))
    judged = masked_frames([oracle_job(frame_model, *pair, OTHER_RINGS[rings]) for pair in pairs])
    for (_, answer), verdict in zip(pairs, judged, strict=True):
        assert_judged_right(answer, verdict)
