"""The device's kernels in Triton's interpreter, in a process that asks for it from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the card runs them")
@pytest.mark.parametrize("name", ["rings", "rolling", "visibility"])
def test_kernels_do_on_the_host_what_a_card_must(name: str) -> None:
    path = str(HERE / f"test_device_{name}.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-1000:]
