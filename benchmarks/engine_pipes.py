"""The standard input and output of an engine that runs in a process of its own."""

from __future__ import annotations

import subprocess
from typing import IO


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """(what it reads, what it writes); RuntimeError where it was started without pipes."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the engine's process must have pipes")
    return process.stdin, process.stdout
