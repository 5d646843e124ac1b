"""Start-up and memory of a server, mstar against the stock one: `python benchmarks/startup.py`.

Start-up is the time from the start of the process to the first 200 of /health. Memory is the
proportional set size of the server and all its descendants after one request. The two sides take
turns, the first changing each time, each on a server of its own; the sizes of the pool and of the
batch are the same. Writes benchmarks/results/cpu-startup.md: medians, the median and the range of
the paired ratios, and the difference in MB.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
SIDES = ("CPU_ATTN", "mstar")
LIMIT_SECONDS = 600.0
REQUEST = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 32}
MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one start of a server showed."""

    seconds: float
    megabytes: float


def measure(backend: str) -> Figures:
    """Start a server, wait for it, send one request, weigh it, end it."""
    begun = time.perf_counter()
    with started(backend) as (process, url, log):
        wait_until_healthy(process, url, log)
        seconds = time.perf_counter() - begun
        answer = httpx.post(f"{url}/v1/completions", json=REQUEST, timeout=120)
        answer.raise_for_status()
        return Figures(seconds=seconds, megabytes=proportional_megabytes(process.pid))


@contextmanager
def started(backend: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A server in a process group of its own, ended with the block."""
    port = free_port()
    flags = ["--attention-backend", backend, "--served-model-name", "smol", "--enforce-eager"]
    flags += ["--dtype", "bfloat16", "--max-model-len", "2048", "--host", "127.0.0.1"]
    vllm = Path(sys.executable).with_name("vllm")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(vllm), "serve", str(MODEL), "--port", str(port), *flags],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, f"http://127.0.0.1:{port}", log
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {tail(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError(f"the server was not healthy within {LIMIT_SECONDS:.0f} s: {tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def proportional_megabytes(root: int) -> float:
    """Proportional set size of a process and its descendants; what they share counts once."""
    total = 0
    for pid in process_tree(root):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total / MEGABYTE


def process_tree(root: int) -> list[int]:
    """`root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may hold spaces.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def compare(repeats: int) -> dict[str, list[Figures]]:
    """Figures per side; a first start of each, which fills the page cache, does not count."""
    figures: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for repeat in range(repeats + 1):
        for side in SIDES if repeat % 2 else SIDES[::-1]:
            found = measure(side)
            if repeat:
                figures[side].append(found)
                print(f"{side}: {found.seconds:.1f} s, {found.megabytes:.0f} MB", flush=True)
    return figures


def table(figures: dict[str, list[Figures]]) -> str:
    """A Markdown table; a ratio above 1 is what mstar costs."""
    rows = ["| figure | stock | mstar | ratio | range of ratios |", "|---|---|---|---|---|"]
    rows.append(row("start to healthy (s)", [[f.seconds for f in figures[s]] for s in SIDES]))
    memory = [[f.megabytes for f in figures[s]] for s in SIDES]
    rows.append(row("memory after one request (MB)", memory))
    differences = [ours - stock for stock, ours in zip(*memory, strict=True)]
    return (
        "\n".join(rows) + f"\n\nmstar's memory less the stock backend's: "
        f"{statistics.median(differences):+.1f} MB "
        f"({min(differences):+.1f} to {max(differences):+.1f})"
    )


def row(name: str, sides: list[list[float]]) -> str:
    stock, ours = sides
    ratios = [mine / theirs for theirs, mine in zip(stock, ours, strict=True)]
    return (
        f"| {name} | {statistics.median(stock):.1f} | {statistics.median(ours):.1f} | "
        f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
    )


def environment_line() -> str:
    import torch
    import vllm

    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}, SmolLM2-135M-Instruct in bfloat16, eager"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="counted starts per side")
    repeats = parser.parse_args().repeats
    figures = compare(repeats)
    load = os.getloadavg()[2]
    notes = f"{repeats} starts per side, alternating; load average {load:.1f} (15 minutes)."
    command = f"python benchmarks/startup.py --repeats {repeats}"
    title = "# Start-up and memory of a server: mstar against CPU_ATTN"
    text = f"{title}\n\n{environment_line()}\n\n`{command}`\n\n{notes}\n\n{table(figures)}\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cpu-startup.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
