"""What cannot be served is refused by name in the front end, before anything is spawned."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

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
    assert plan.retention is not None and plan.retention.context_budget == 256
    assert plan.adapter == "llama"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"additional_config": {"mstar": {"retenton": {}}}}, "retenton"),
        ({"additional_config": {"mstar": {"retention": {"context_budget": 0}}}}, "context_budget"),
        ({"additional_config": {"mstar": 5}}, "additional_config"),
        ({"block_size": 24}, "--block-size must be a multiple of 16"),
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


COMMANDS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "a misspelt key": (
        ["--additional-config", json.dumps({"mstar": {"retentoin": {}}})],
        {},
        "knows retention, kernels, ring, got retentoin",
    ),
    "a misspelt backend": (["--attention-backend", "mstarr"], {}, "MSTARR"),
    "plugins without us": ([], {"VLLM_PLUGINS": "other"}, "MSTAR"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_ends_within_seconds_with_one_sentence(case: str, smollm2: Path) -> None:
    flags, environment, sentence = COMMANDS[case]
    vllm = Path(sys.executable).with_name("vllm")
    base = ["serve", str(smollm2), "--attention-backend", "mstar", "--host", "127.0.0.1"]
    started = time.monotonic()
    import os

    done = subprocess.run(
        [str(vllm), *base, *flags],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
    assert time.monotonic() - started < 240
