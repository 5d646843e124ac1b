"""The OpenAI surface over HTTP, of a real server process whose server bounds nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.server

MODEL = "smol"
BUDGET, PREFIX = "mstar_context_budget", "mstar_protected_prefix"
STORY = "The old lighthouse keeper walked down to the shore. " * 12


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], smollm2: Any) -> Iterator[Any]:
    flags = ["--attention-backend", "mstar", "--served-model-name", MODEL, "--enforce-eager"]
    flags += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "16"]
    flags += ["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "140"]
    with serve(smollm2, *flags) as running:
        yield running


@pytest.fixture
def post(server: Any) -> Callable[..., httpx.Response]:
    def send(path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return httpx.post(f"{server.url}/v1/{path}", timeout=300, **kwargs)

    return send


def completion(prompt: Any, **values: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, **values}


def chat(text: str, **values: Any) -> dict[str, Any]:
    message = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": message, "temperature": 0, "max_tokens": 16, **values}


def stream(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, with its usage."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{server.url}/v1/{path}"
    with httpx.stream("POST", url, json=streamed, timeout=300) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def metric(server: Any, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in /metrics"
    return float(found[1])


def until(holds: Callable[[], bool], limit: float = 60.0) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return holds()


def test_the_model_is_listed(server: Any) -> None:
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()
    assert [model["id"] for model in models["data"]] == [MODEL]


def test_the_start_says_what_is_served_and_what_is_bounded(server: Any) -> None:
    printed = server.printed()
    assert "mstar serves LlamaForCausalLM (adapter llama)" in printed
    assert "30 layers, full attention, 3 KV heads of 64, page 16 tokens, 46,080 bytes" in printed
    assert "mstar pool: 139 pages, 2,224 token slots; 2.2 requests of 1,024 tokens fit" in printed
    assert "mstar bounds nothing; requests may bring a policy" in printed


def test_a_completion_is_sensible_text(post: Callable[..., httpx.Response]) -> None:
    answer = post("completions", completion("The capital of France is")).json()
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 16


def test_chat_uses_the_models_template(post: Callable[..., httpx.Response]) -> None:
    answer = post("chat/completions", chat("What is the capital of France?")).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_streaming_gives_the_same_text_and_a_usage_chunk(
    server: Any, post: Callable[..., httpx.Response]
) -> None:
    body = completion(STORY, max_tokens=24)
    whole = post("completions", body).json()["choices"][0]["text"]
    chunks = stream(server, "completions", body)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_a_streamed_chat_gives_the_same_text_and_a_usage_chunk(
    server: Any, post: Callable[..., httpx.Response]
) -> None:
    body = chat("Tell me of the sea.", max_tokens=24)
    whole = post("chat/completions", body).json()["choices"][0]["message"]["content"]
    chunks = stream(server, "chat/completions", body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_three_answers_of_one_request_differ_and_a_seed_repeats_them(
    post: Callable[..., httpx.Response],
) -> None:
    body = completion("Once upon a time", n=3, temperature=1.0, seed=11)
    first, second = post("completions", body).json(), post("completions", body).json()
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]


def test_a_seeded_prompt_longer_than_a_chunk_is_answered_and_repeats(
    post: Callable[..., httpx.Response],
) -> None:
    body = completion(STORY * 4, temperature=1.0, seed=1)
    answers = [post("completions", body).json() for _ in range(2)]
    assert answers[0]["usage"]["prompt_tokens"] > 3 * 128
    first, second = (answer["choices"][0]["text"] for answer in answers)
    assert first == second


def test_a_stop_string_ends_the_answer(post: Callable[..., httpx.Response]) -> None:
    answer = post("completions", completion("1, 2, 3, 4,", max_tokens=40, stop=[" 9"])).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert " 9" not in answer["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_echo_repeats_the_prompt_with_logprobs(
    max_tokens: int, post: Callable[..., httpx.Response]
) -> None:
    body = completion(STORY, echo=True, max_tokens=max_tokens, logprobs=1)
    answer = post("completions", body).json()["choices"][0]
    assert answer["text"].startswith(STORY)
    assert len(answer["logprobs"]["tokens"]) > 100


def test_prompt_logprobs_of_a_cached_prompt_are_those_of_a_cold_one(
    post: Callable[..., httpx.Response],
) -> None:
    body = completion(STORY + "Twice.", prompt_logprobs=1, max_tokens=1)
    first, second = (post("completions", body).json()["choices"][0] for _ in range(2))
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    assert len(first["prompt_logprobs"]) > 100


def test_logprobs_name_the_alternatives_of_each_token(
    post: Callable[..., httpx.Response],
) -> None:
    answer = post("completions", completion("One, two,", max_tokens=4, logprobs=3)).json()
    found = answer["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
    answer = post("chat/completions", chat("Hello", max_tokens=4, logprobs=True, top_logprobs=2))
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [len(step["top_logprobs"]) for step in content] == [2] * 4


def test_logit_bias_forces_a_token(post: Callable[..., httpx.Response]) -> None:
    body = completion("Hello", max_tokens=3, logit_bias={"260": 100}, logprobs=0)
    tokens = post("completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert len(set(tokens)) == 1


def test_a_json_schema_gives_json_of_that_shape(post: Callable[..., httpx.Response]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    own = {BUDGET: 32, PREFIX: 8}
    body = chat("Name a city and a year.", max_tokens=80, response_format=form, vllm_xargs=own)
    answer = post("chat/completions", body).json()
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert set(value) == {"city", "year"}


def test_thirty_two_clients_get_what_each_gets_alone(
    server: Any, post: Callable[..., httpx.Response]
) -> None:
    """All prompts fit into the pool, half of the answers do not, so this preempts, however slowly
    the clients come.
    """
    preempted = metric(server, "vllm:num_preemptions_total")
    bodies = [
        completion(f"{i}. {STORY}"[: 40 + 16 * i], max_tokens=64, ignore_eos=True)
        for i in range(32)
    ]
    with ThreadPoolExecutor(32) as clients:
        together = list(clients.map(lambda body: post("completions", body), bodies))
    assert [response.status_code for response in together] == [200] * 32
    assert until(lambda: metric(server, "vllm:num_preemptions_total") > preempted)
    for i in (0, 9, 21, 31):
        alone = post("completions", bodies[i]).json()
        assert together[i].json()["choices"][0]["text"] == alone["choices"][0]["text"]


def test_pages_of_an_aborted_stream_return(server: Any) -> None:
    body = completion(STORY, max_tokens=600, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
        lines = response.iter_lines()
        next(lines)
        assert until(lambda: metric(server, "vllm:kv_cache_usage_perc") > 0)
    assert until(lambda: metric(server, "vllm:kv_cache_usage_perc") == 0)


BAD_BODIES: dict[str, Any] = {
    "empty prompt": completion(""),
    "empty prompt list": completion([]),
    "null prompt": completion(None),
    "prompt of a wrong type": completion({"a": 1}),
    "prompt past the model": completion(list(range(100, 1400))),
    "wrong model": {**completion("x"), "model": "other"},
    "n below one": completion("x", n=-1),
    "temperature below zero": completion("x", temperature=-1),
    "wrong max_tokens": completion("x", max_tokens="many"),
    "wrong stop": completion("x", stop=5),
    "wrong logit_bias": completion("x", logit_bias={"word": 1}),
    "no messages": {**chat("x"), "messages": []},
    "null message": {**chat("x"), "messages": [None]},
    "bad schema": chat(
        "x", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}
    ),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_body_is_refused_and_the_next_request_is_served(
    case: str, post: Callable[..., httpx.Response]
) -> None:
    body = BAD_BODIES[case]
    refused = post("chat/completions" if "messages" in body else "completions", body)
    assert 400 <= refused.status_code < 500, refused.text[:500]
    assert post("completions", completion("Still here")).status_code == 200


BROKEN_BODIES = [
    *(b"", b"{", b"[]", b"null", b"[" * 5000, b'{"prompt": NaN}'),
    b'{"model": "smol", "prompt": "x", "temperature": NaN}',
    b'{"model": "smol", "prompt": "x", "max_tokens": Infinity}',
]


@pytest.mark.parametrize("content", BROKEN_BODIES)
def test_a_broken_body_is_refused(content: bytes, post: Callable[..., httpx.Response]) -> None:
    headers = {"Content-Type": "application/json"}
    refused = post("completions", content=content, headers=headers)
    assert 400 <= refused.status_code < 500
    assert post("completions", completion("Still here")).status_code == 200


def test_a_body_of_ten_megabytes_is_refused_with_a_short_answer(
    post: Callable[..., httpx.Response],
) -> None:
    refused = post("completions", completion("a " * 5_000_000))
    assert 400 <= refused.status_code < 500
    assert len(refused.content) < 2000
    assert post("completions", completion("Still here")).status_code == 200


BAD_POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "fraction": ({BUDGET: 12.5}, BUDGET),
    "zero": ({BUDGET: 0}, BUDGET),
    "negative": ({BUDGET: -8}, BUDGET),
    "text": ({BUDGET: "many"}, BUDGET),
    "huge": ({BUDGET: 2**62}, BUDGET),
    "list": ({BUDGET: [8]}, BUDGET),
    "past the model": ({BUDGET: 1000, PREFIX: 30}, BUDGET),
    "prefix alone": ({PREFIX: 8}, BUDGET),
    "bad prefix": ({BUDGET: 8, PREFIX: -1}, PREFIX),
    "misspelt prefix": ({BUDGET: 8, PREFIX: "promt"}, PREFIX),
    "unknown key": ({"mstar_budget": 8}, "mstar_budget"),
}


@pytest.mark.parametrize("case", BAD_POLICIES)
def test_a_bad_policy_is_refused_by_name(case: str, post: Callable[..., httpx.Response]) -> None:
    values, parameter = BAD_POLICIES[case]
    refused = post("completions", completion("x", vllm_xargs=values))
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert parameter in error["message"]
    assert error["param"] == parameter


def test_beam_search_with_a_policy_of_its_own_is_refused(
    post: Callable[..., httpx.Response],
) -> None:
    body = completion("One, two,", n=2, use_beam_search=True, max_tokens=4)
    assert post("completions", body).status_code == 200
    refused = post("completions", {**body, "vllm_xargs": {BUDGET: 32}})
    assert refused.status_code == 400
    assert "beam search" in refused.json()["error"]["message"]


def test_a_bounded_request_says_what_it_released_and_shows_in_the_metrics(
    server: Any, post: Callable[..., httpx.Response]
) -> None:
    before = metric(server, "vllm:mstar_released_pages_total")
    own = {BUDGET: 48, PREFIX: "prompt"}
    body = completion("A story:", max_tokens=300, ignore_eos=True, vllm_xargs=own)
    answer = post("completions", body).json()
    note = answer["kv_transfer_params"]["mstar"]
    assert note["context_budget"] == 48
    assert note["protected_prefix"] == answer["usage"]["prompt_tokens"]
    assert note["released_tokens"] == 240
    assert answer["usage"]["completion_tokens"] == 300
    assert until(lambda: metric(server, "vllm:mstar_released_pages_total") == before + 15)


def test_an_unbounded_request_brings_no_note(post: Callable[..., httpx.Response]) -> None:
    assert post("completions", completion("A story:")).json()["kv_transfer_params"] is None
