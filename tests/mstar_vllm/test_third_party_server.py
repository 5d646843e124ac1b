"""The example of a third party's adapter: installed by pip, it is what a server goes by."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("hatchling")
pytestmark = [pytest.mark.server, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_adapter"


def install(target: Path, work: Path) -> None:
    shutil.copytree(EXAMPLE, work)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(work)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_server_goes_by_the_installed_adapter(serve: Any, smollm2: Path, tmp_path: Path) -> None:
    install(tmp_path / "installed", tmp_path / "source")
    flags = ["--attention-backend", "mstar", "--dtype", "float32", "--max-model-len", "2048"]
    flags += ["--served-model-name", "smol"]
    with serve(smollm2, *flags, PYTHONPATH=str(tmp_path / "installed")) as server:
        printed = server.printed()
        assert "mstar serves LlamaForCausalLM (adapter bounded_llama)" in printed
        assert "mstar bounds requests to 1,024 tokens behind 64 protected" in printed
        body = {"model": "smol", "prompt": "word " * 1300, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        released = answer["kv_transfer_params"]["mstar"]
        assert (released["context_budget"], released["protected_prefix"]) == (1024, 64)
        assert released["released_tokens"] > 0
