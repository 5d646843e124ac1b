"""Engines in a process of their own, and the oracle their answers are compared with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# Engines use every core, whatever the tests' own process is limited to, and do not spin.
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE"}
COMMAND_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    **THREADS,
}
VLLM = str(Path(sys.executable).with_name("vllm"))
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
            env={**os.environ, **THREADS, **environment},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert answered.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        results: list[Result] = json.loads(answered.read_text())
        return results

    return run


class Oracle:
    """masked_model.py in a process of its own, started by the first question."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, jobs: list[Job]) -> list[Any]:
        if self._process is None:
            self._process = self._start()
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None and received is not None
        sent.write(json.dumps(jobs) + "\n")
        sent.flush()
        for line in received:
            if line.startswith("judged "):
                results: list[Any] = json.loads(line.removeprefix("judged "))
                return results
        raise AssertionError(self._log.read_text()[-4000:])

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "masked_model.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="session")
def masked_logprobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Answers of Hugging Face models with the explicit mask of the rule (see masked_model.py)."""
    oracle = Oracle(tmp_path_factory.mktemp("oracle") / "log")
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def frame_model(script: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny frame decoder."""
    folder = tmp_path_factory.mktemp("frames") / "frame-decoder"
    return str(script("frame_model").build(folder))


@pytest.fixture(scope="session")
def masked_frames(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], list[Any]]:
    """Runs masked_frames.py."""

    def run(jobs: list[Job]) -> list[Any]:
        folder = tmp_path_factory.mktemp("oracle")
        asked, answered = folder / "jobs.json", folder / "results.json"
        asked.write_text(json.dumps(jobs))
        command = [sys.executable, str(HERE / "masked_frames.py"), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert answered.exists(), done.stdout[-4000:] + done.stderr[-4000:]
        results: list[Any] = json.loads(answered.read_text())
        return results

    return run


@pytest.fixture(scope="session")
def vllm_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `vllm ARGUMENTS` to its end; what it printed is in `stdout`."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [VLLM, *arguments],
            env={**os.environ, **COMMAND_ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    return run


@dataclass(frozen=True)
class Server:
    """A running `vllm serve`: where it listens and what it has printed so far."""

    url: str
    log: Path

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`with serve(model, "--flag", ...) as server:` is a real server, ready for requests."""

    @contextmanager
    def start(model: Path, *flags: str, **environment: str) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        port = _free_port()
        process = start_server(model, port, log, flags, environment)
        try:
            _wait_until_healthy(process, port, log)
            yield Server(url=f"http://127.0.0.1:{port}", log=log)
        finally:
            stop_server(process)

    return start


def start_server(
    model: Path, port: int, log: Path, flags: Iterable[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `vllm serve` in a session of its own, so that ending it ends its workers."""
    command = [VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **COMMAND_ENVIRONMENT, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_server(process: subprocess.Popen[bytes], limit: float = 60.0) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(
    process: subprocess.Popen[bytes], port: int, log: Path, limit: float = 600.0
) -> None:
    import httpx

    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}: {log.read_text()[-4000:]}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the server was not healthy within {limit} s: {log.read_text()[-4000:]}")
