"""A bounded server, two API processes and a small pool: past the pool, under load, exact."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
POLICY = '{"mstar": {"retention": {"context_budget": 192, "protected_prefix": 16}}}'


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], smollm2: Any) -> Iterator[Any]:
    flags = ["--attention-backend", "mstar", "--served-model-name", "smol", "--enforce-eager"]
    flags += ["--dtype", "float32", "--max-model-len", "4096", "--block-size", "16"]
    flags += ["--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "60"]
    flags += ["--additional-config", POLICY, "--api-server-count", "2"]
    with serve(smollm2, *flags) as running:
        yield running


def complete(server: Any, **values: Any) -> dict[str, Any]:
    body = {"model": "smol", "prompt": "A diary:", "temperature": 0, **values}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=900)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_start_says_what_the_policy_costs_and_gains(server: Any) -> None:
    printed = server.printed()
    assert "mstar bounds requests to 192 tokens behind 16 protected" in printed
    assert "at most 21 pages per request and group; 0.2 requests would fit without" in printed
    assert "2.9 requests of 4,096 tokens fit" in printed


def test_a_generation_longer_than_the_pool_is_served(server: Any) -> None:
    """944 slots in the pool; 1,100 tokens."""
    answer = complete(server, max_tokens=1100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 1100
    assert answer["kv_transfer_params"]["mstar"]["released_tokens"] > 850
    assert answer["kv_transfer_params"]["mstar"]["positions"] == "rolling"


def test_a_prompt_longer_than_the_pool_is_served(server: Any) -> None:
    answer = complete(server, prompt=list(range(1000, 2500)), max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == 1500


def test_released_pages_show_in_the_metrics_of_each_api_process(server: Any) -> None:
    for _ in range(6):
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert "vllm:mstar_released_pages_total" in text


def test_answers_under_load_are_those_of_a_solo_run(server: Any) -> None:
    spec = importlib.util.spec_from_file_location("stress", ROOT / "benchmarks" / "stress.py")
    assert spec is not None and spec.loader is not None
    stress = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["stress"] = stress
    spec.loader.exec_module(stress)
    counts, wrong = stress.run(server.url, seconds=20, clients=24, longest=160, num_kinds=12)
    assert wrong == []
    assert counts["finished"] > 10
