"""A token world model over HTTP: sessions of constant size, and the one too many waits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.server

FRAME = 16
SESSIONS = 2
# As in test_ring_engine.py; one block is never given out.
BLOCKS = 1 + SESSIONS * 33
FLAGS = f"""--attention-backend mstar --served-model-name world --enforce-eager --dtype float32
    --max-model-len 32768 --max-num-batched-tokens 64 --max-num-seqs 8
    --num-gpu-blocks-override {BLOCKS}"""
FIRST_FRAME = list(range(FRAME))


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Any],
    script: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    model: Path = script("frame_model").build(tmp_path_factory.mktemp("frames") / "decoder")
    with serve(model, *FLAGS.split()) as running:
        yield running


def body(num_frames: float, **values: Any) -> dict[str, Any]:
    return {
        "model": "world",
        "prompt": FIRST_FRAME,
        "max_tokens": int(num_frames * FRAME),
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        **values,
    }


@pytest.fixture
def post(server: Any) -> Callable[..., httpx.Response]:
    def send(request: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=request, timeout=600)

    return send


def tokens_of(lines: Iterator[str]) -> Iterator[int]:
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield from choice["token_ids"] or ()


def metric(server: Any, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in /metrics"
    return float(found[1])


def until(holds: Callable[[], bool], limit: float = 60.0) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return holds()


def test_the_start_says_what_a_session_claims(server: Any) -> None:
    printed = server.printed()
    assert "mstar serves FrameDecoderForCausalLM (adapter frame_decoder)" in printed
    assert "ring of 4 frames, 2 KV heads of 64, page 16 tokens" in printed
    assert "ring of 4 frames 4 apart, 2 KV heads of 64" in printed
    assert "a session claims 33 pages at its start, however long it is" in printed
    assert printed.count("so the prefix cache stays empty") == 1


def test_a_stream_far_past_the_horizon_holds_the_same_pages_all_along(server: Any) -> None:
    used: set[float] = set()
    tokens: list[int] = []
    request = body(80, stream=True)
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=600) as response:
        for token in tokens_of(response.iter_lines()):
            tokens.append(token)
            if len(tokens) % (16 * FRAME) == FRAME:
                used.add(metric(server, "kv_cache_usage_perc"))
    assert len(tokens) == 80 * FRAME
    # The gauge is written some time after the first step.
    used.discard(0.0)
    assert len(used) == 1, "the share of the pool must not change"
    assert used.pop() == pytest.approx(1 / SESSIONS, abs=0.02)
    assert until(lambda: metric(server, "kv_cache_usage_perc") == 0)


def test_a_session_goes_on_from_its_frames_as_if_it_had_not_stopped(
    post: Callable[..., httpx.Response],
) -> None:
    whole = post(body(40)).json()["choices"][0]["token_ids"]
    stopped = FIRST_FRAME + whole[: 20 * FRAME]
    rest = post(body(20, prompt=stopped)).json()["choices"][0]["token_ids"]
    assert rest == whole[20 * FRAME :]


def test_the_session_after_the_last_that_fits_waits_its_turn(
    server: Any, post: Callable[..., httpx.Response]
) -> None:
    alone = post(body(3)).json()["choices"][0]["token_ids"]
    url = f"{server.url}/v1/completions"
    long = body(1000, stream=True)
    with (
        ThreadPoolExecutor(1) as client,
        httpx.stream("POST", url, json=long, timeout=600) as first,
        httpx.stream("POST", url, json=long, timeout=600) as second,
    ):
        # A stream whose lines nobody holds is closed.
        streams = [tokens_of(stream.iter_lines()) for stream in (first, second)]
        assert next(streams[0]) == next(streams[1])
        third = client.submit(post, body(3))
        assert until(lambda: metric(server, "num_requests_waiting") == 1)
        assert metric(server, "num_requests_running") == SESSIONS
        assert not third.done()
        second.close()
        assert third.result(300).json()["choices"][0]["token_ids"] == alone
        assert metric(server, "num_preemptions_total") == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt that ends inside a frame": (body(1, prompt=[1] * 37), "prompt"),
    "a policy of its own": (
        body(1, vllm_xargs={"mstar_context_budget": 64}),
        "mstar_context_budget",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_refused_by_name_and_the_next_is_served(
    case: str, post: Callable[..., httpx.Response]
) -> None:
    request, parameter = REFUSED[case]
    refused = post(request)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == parameter
    assert post(body(1)).status_code == 200


def test_a_generation_may_end_inside_a_frame(post: Callable[..., httpx.Response]) -> None:
    answer = post(body(2.5)).json()
    assert len(answer["choices"][0]["token_ids"]) == 40
