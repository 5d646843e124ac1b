"""What cannot be served is refused by name in the front end, before anything is spawned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from mstar_vllm.positions import RollingPolicy

pytestmark = pytest.mark.vllm

RETENTION = {"mstar": {"retention": {"context_budget": 256, "protected_prefix": 4}}}


@pytest.fixture
def configure(smollm2: Path) -> Callable[..., Any]:
    """The front end's configuration of a server with our backend, made in this process."""

    def make(model: Path = smollm2, **changes: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        values = {"attention_backend": "mstar", "max_model_len": 512, **changes}
        return EngineArgs(model=str(model), **values).create_engine_config()

    return make


def test_a_policy_is_accepted_where_it_can_be_honoured(configure: Callable[..., Any]) -> None:
    from mstar_vllm.serving import serving_plan

    plan = serving_plan(configure(additional_config=RETENTION))
    assert plan.obstacle is None
    assert plan.retention == RollingPolicy(256, 4)
    assert plan.adapter == "llama"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"additional_config": {"mstar": {"retenton": {}}}}, "retenton"),
        ({"additional_config": {"mstar": {"retention": {"context_budget": 0}}}}, "context_budget"),
        ({"additional_config": {"mstar": 5}}, "additional_config"),
        ({"block_size": 24}, "--block-size must be a multiple of 16"),
        pytest.param(
            {"additional_config": {"mstar": {"kernels": "flashinfer"}}},
            "['kernels'] must be left out on CPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="is for CPU"),
        ),
        (
            {"additional_config": RETENTION, "kv_sharing_fast_prefill": True},
            "cannot bound requests with fast prefill",
        ),
        (
            {
                "additional_config": RETENTION,
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": "unused"},
                },
            },
            "cannot bound requests with a KV connector",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    changes: dict[str, Any], named: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="mstar") as refused:
        configure(**changes)
    assert named in str(refused.value)


def test_windows_without_the_hybrid_manager_are_served_but_not_bounded(
    configure: Callable[..., Any], tiny_model: Callable[[str], Path]
) -> None:
    gemma = tiny_model("gemma3-mixed")
    configure(model=gemma, disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ValueError, match="the hybrid KV cache manager disabled"):
        configure(model=gemma, disable_hybrid_kv_cache_manager=True, additional_config=RETENTION)


@pytest.mark.parametrize("config", [{"backend": "mstar"}, {"backend": "MSTAR"}])
def test_the_backend_can_be_selected_by_the_attention_config(
    config: dict[str, Any], configure: Callable[..., Any]
) -> None:
    from mstar_vllm.plugin import is_selected

    assert is_selected(configure(attention_backend=None, attention_config=config))


def test_a_server_can_select_the_backend_for_one_kind_of_layer(
    configure: Callable[..., Any],
) -> None:
    from mstar_vllm.plugin import is_selected

    chosen = {"backend_per_kind": {"full_attention": "mstar"}}
    assert is_selected(configure(attention_backend=None, attention_config=chosen))


def test_a_server_without_us_is_not_checked(configure: Callable[..., Any]) -> None:
    config = configure(attention_backend="CPU_ATTN", additional_config={"mstar": {"typo": 1}})
    assert config.additional_config == {"mstar": {"typo": 1}}


def test_an_unsupported_engine_is_refused_with_both_versions(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(RuntimeError, match=r"mstar supports vLLM 0\.32, 0\.33, found 0\.31\.2"):
        configure()
    configure(attention_backend="CPU_ATTN")


STOCK_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

llm = LLM(model=sys.argv[1], attention_backend="CPU_ATTN", max_model_len=256, enforce_eager=True)
llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2), use_tqdm=False)
touched = [
    f"{owner.__name__}.{name}"
    for owner in (*CPUModelRunner.__mro__, Scheduler, InputProcessor)
    for name, value in vars(owner).items()
    if hasattr(value, "_mstar_wrapper")
]
modules = sorted(name for name in sys.modules if name.startswith("mstar"))
print(json.dumps({"touched": touched, "modules": modules}))
"""


@pytest.mark.slow
def test_a_stock_engine_runs_none_of_our_code_but_the_registration(
    tiny_model: Callable[[str], Path],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOCK_ENGINE, str(tiny_model("llama-9-3"))],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["touched"] == []
    assert found["modules"] == ["mstar_vllm", "mstar_vllm.compat", "mstar_vllm.plugin"]


COMMANDS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "a misspelt key": (
        ["--additional-config", json.dumps({"mstar": {"retentoin": {}}})],
        {},
        "knows retention, kernels, ring, got retentoin",
    ),
    "a misspelt backend": (["--attention-backend", "mstarr"], {}, "MSTARR"),
    "plugins without us": ([], {"VLLM_PLUGINS": "other"}, "MSTAR"),
    "plugins with a misspelt us": ([], {"VLLM_PLUGINS": "mstarr"}, "MSTAR"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_ends_within_seconds_with_one_sentence(
    case: str, smollm2: Path, vllm_command: Callable[..., Any]
) -> None:
    flags, environment, sentence = COMMANDS[case]
    base = ["serve", str(smollm2), "--attention-backend", "mstar", "--host", "127.0.0.1"]
    started = time.monotonic()
    done = vllm_command(*base, *flags, **environment)
    assert done.returncode != 0
    assert sentence in done.stdout
    assert time.monotonic() - started < 240


IMPORT_FAILS = "import sys; sys.modules[{!r}] = None"
ENGINE_MOVED = """
import mstar_vllm.plugin

def moved():
    raise ImportError("moved elsewhere")

mstar_vllm.plugin._register_models = moved
"""
# What is broken -> code that breaks it in every process, and what the start says.
BROKEN = {
    "a module of the backend": (IMPORT_FAILS.format("mstar_vllm.serving"), "mstar_vllm.serving"),
    "the registration": (IMPORT_FAILS.format("mstar_vllm.compat"), "mstar could not be registered"),
    "what the engine offers": (ENGINE_MOVED, "with this vLLM: ImportError('moved elsewhere')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_import_ends_the_start_with_its_cause(
    case: str, smollm2: Path, tmp_path: Path, vllm_command: Callable[..., Any]
) -> None:
    code, sentence = BROKEN[case]
    (tmp_path / "sitecustomize.py").write_text(code)
    base = ["serve", str(smollm2), "--attention-backend", "mstar", "--host", "127.0.0.1"]
    done = vllm_command(*base, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert sentence in done.stdout
