"""What adapters declare is what vLLM builds from the same numbers, layer by layer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar_plugin.adapters import find_adapter
from mstar_plugin.model_kv import LayerKind, LayerKV

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FILES = sorted((Path(__file__).parent / "published").glob("*.json"))
NOT_BUILT = {
    "BAAI--Emu3-Chat-hf": "its text model alone is none that vLLM can build",
    "facebook--chameleon-7b": "vLLM has dropped it",
    "deepseek-ai--deepseek-moe-16b-base": "its configuration is remote code",
}
BUILT = [file for file in FILES if file.stem not in NOT_BUILT]
ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def built_by_vllm() -> dict[str, dict[str, Any]]:
    script = Path(__file__).parent / "vllm_layers.py"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, BUILT)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["file"]: row for row in rows}


def as_row(layer: LayerKV) -> dict[str, Any]:
    windowed = layer.window_tokens
    return {
        "index": layer.index,
        "num_kv_heads": layer.num_kv_heads,
        "num_qo_heads": layer.num_qo_heads,
        "head_dim": layer.head_dim,
        "window_tokens": windowed if layer.kind is LayerKind.SLIDING else None,
        "chunk_tokens": windowed if layer.kind is LayerKind.CHUNKED else None,
        "shares_kv_with": layer.shares_kv_with,
        "has_sinks": layer.has_sinks,
        "soft_cap": layer.soft_cap,
    }


@pytest.mark.parametrize("file", BUILT, ids=lambda file: file.stem)
def test_vllm_builds_the_declared_layers(
    file: Path, built_by_vllm: dict[str, dict[str, Any]]
) -> None:
    config = json.loads(file.read_text())
    row = built_by_vllm[file.stem]
    assert "error" not in row, row["error"]
    declared = find_adapter(config["architectures"]).declare(config).layers
    built = [{k: v for k, v in layer.items() if k != "rotary"} for layer in row["layers"]]
    assert [as_row(layer) for layer in declared] == built


@pytest.mark.parametrize("file", BUILT, ids=lambda file: file.stem)
def test_the_configuration_vllm_holds_declares_what_the_file_does(
    file: Path, built_by_vllm: dict[str, dict[str, Any]]
) -> None:
    assert built_by_vllm[file.stem]["is_read_alike"]


@pytest.mark.parametrize("file", BUILT, ids=lambda file: file.stem)
def test_vllm_turns_keys_as_declared(file: Path, built_by_vllm: dict[str, dict[str, Any]]) -> None:
    config = json.loads(file.read_text())
    declared = find_adapter(config["architectures"]).declare(config).layers
    built = {layer["index"]: layer["rotary"] for layer in built_by_vllm[file.stem]["layers"]}
    for layer in declared:
        if built[layer.index] is None or layer.rotary is None:
            continue
        assert {
            "theta": layer.rotary.theta,
            "rotary_dim": layer.rotary.rotary_dim,
            "interleaved": layer.rotary.interleaved,
        } == built[layer.index], f"layer {layer.index}"
