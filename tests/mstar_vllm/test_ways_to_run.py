"""Each way to run vLLM answers through mstar as the LLM class does on the stock backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_cases import tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = {"max_tokens": 16, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5}
FLAGS = ["--attention-backend", "mstar", "--enforce-eager", "--dtype", "float32"]
FLAGS += ["--max-model-len", "512"]
RANK = 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


ROUND = [
    {"prompt": tokens(70, 1), "sampling": GREEDY},
    {"prompt": tokens(35, 2), "sampling": SEEDED},
    {"prompt": tokens(5, 3), "sampling": GREEDY},
]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-9-3")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights for every attention projection of the tiny model."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {}
    with safe_open(str(model / "model.safetensors"), "pt") as base:
        for name in base.keys():  # noqa: SIM118, which is no mapping
            if name.split(".")[-2] in PROJECTIONS:
                rows, columns = base.get_slice(name).get_shape()
                stem = "base_model.model." + name.removesuffix(".weight")
                down = torch.randn(RANK, columns, generator=generator) / columns**0.5
                weights[f"{stem}.lora_A.weight"] = down
                weights[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = list(PROJECTIONS)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def batch(
    model: Path, vllm_command: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The choices of `vllm run-batch` for two chats, with the token ids of prompts and answers."""
    folder = tmp_path_factory.mktemp("batch")
    asked, answered = folder / "asked.jsonl", folder / "answered.jsonl"
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": 16,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        }
        for number, text in enumerate(("What is a page?", "Count the keepers of the lighthouse."))
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["-i", str(asked), "-o", str(answered), "--served-model-name", "tiny"]
    done = vllm_command("run-batch", "--model", str(model), *files, *FLAGS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "mstar serves LlamaForCausalLM" in done.stdout
    results = [json.loads(line) for line in answered.read_text().splitlines()]
    assert all(result["error"] is None for result in results), results
    return [result["response"]["body"] for result in results]


@pytest.fixture(scope="module")
def answers(
    run_engines: Callable[..., list[Any]], model: Path, adapter: Path, batch: list[dict[str, Any]]
) -> dict[str, Any]:
    """Rounds of the stock LLM class, of AsyncLLM, and of both backends with a LoRA adapter."""
    chats = [{"prompt": body["prompt_token_ids"], "sampling": GREEDY} for body in batch]
    adapted = [{**request, "lora": str(adapter)} for request in ROUND]
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_model_len": 512, "block_size": 32}
    plain = {"max_model_len": 512}

    def job(backend: str, engine: dict[str, Any], *rounds: Any, **more: Any) -> dict[str, Any]:
        return {
            "model": str(model),
            "backend": backend,
            "engine": engine,
            "rounds": list(rounds),
            **more,
        }

    jobs = {
        "stock": job("CPU_ATTN", plain, ROUND, chats),
        "async": job("mstar", plain, ROUND, **{"async": True}),
        # Not in one batch: vLLM's CPU operations then adapt requests without an adapter too. Each
        # round finds the pages of the one before, of which the adapter has its own.
        "stock lora": job("CPU_ATTN", lora, ROUND, adapted, adapted, ROUND),
        "mstar lora": job("mstar", lora, ROUND, adapted, adapted, ROUND),
    }
    results = run_engines(jobs.values(), VLLM_WORKER_MULTIPROC_METHOD="spawn")
    assert not [result for result in results if "error" in result], results
    return {name: result["rounds"] for name, result in zip(jobs, results, strict=True)}


def test_an_async_engine_answers_as_the_stock_one_does(answers: dict[str, Any]) -> None:
    assert answers["async"][0] == answers["stock"][0]


def test_an_adapted_model_answers_as_on_the_stock_backend(answers: dict[str, Any]) -> None:
    assert answers["mstar lora"] == answers["stock lora"]


def test_the_adapter_matters_and_only_to_the_requests_that_ask_for_it(
    answers: dict[str, Any],
) -> None:
    rounds = answers["mstar lora"]
    plain, adapted, again, plain_again = ([one["tokens"] for one in each] for each in rounds)
    assert plain == plain_again == [one["tokens"] for one in answers["stock"][0]]
    assert adapted == again
    assert not any(one == other for one, other in zip(plain, adapted, strict=True))
    assert [one["cached"] for one in rounds[1]] == [0, 0, 0]
    assert rounds[2][0]["cached"] > 0


def test_run_batch_answers_as_the_stock_llm_class_does(
    batch: list[dict[str, Any]], answers: dict[str, Any]
) -> None:
    found = [[choice["token_ids"] for choice in body["choices"]] for body in batch]
    assert found == [one["tokens"] for one in answers["stock"][1]]
    assert all(body["choices"][0]["message"]["content"] for body in batch)


def test_bench_latency_runs_and_writes_its_result(
    model: Path, vllm_command: Callable[..., Any], tmp_path: Path
) -> None:
    result = tmp_path / "latency.json"
    sizes = ["--input-len", "32", "--output-len", "8", "--batch-size", "2"]
    sizes += ["--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(result)]
    done = vllm_command("bench", "latency", "--model", str(model), *sizes, *FLAGS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "mstar serves LlamaForCausalLM" in done.stdout
    latencies = json.loads(result.read_text())["latencies"]
    assert len(latencies) == 2
    assert min(latencies) > 0
