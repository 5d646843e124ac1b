"""Engines in a process of their own, and the oracle their answers are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
Job = dict[str, Any]
Result = dict[str, Any]


@pytest.fixture(scope="session")
def run_engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Iterable[Job]], list[Result]]:
    """Runs jobs (see run_engines.py) one after the other in one new process."""

    def run(jobs: Iterable[Job], **environment: str) -> list[Result]:
        folder = tmp_path_factory.mktemp("engines")
        asked, answered = folder / "jobs.json", folder / "results.json"
        asked.write_text(json.dumps(list(jobs)))
        command = [sys.executable, str(HERE / "run_engines.py"), str(asked), str(answered)]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert answered.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        results: list[Result] = json.loads(answered.read_text())
        return results

    return run


@pytest.fixture(scope="session")
def masked_logprobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[list[Job]], list[list[list[float]]]]:
    """Answers of Hugging Face models with the explicit mask of the rule (see masked_model.py)."""

    def run(jobs: list[Job]) -> list[Any]:
        folder = tmp_path_factory.mktemp("oracle")
        asked, answered = folder / "jobs.json", folder / "results.json"
        asked.write_text(json.dumps(jobs))
        command = [sys.executable, str(HERE / "masked_model.py"), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert answered.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        results: list[Any] = json.loads(answered.read_text())
        return results

    return run
