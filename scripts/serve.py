"""Start `vllm serve` with the mstar backend and print a request to paste once it answers.

The server takes this process's place, so signals and the exit code are its own. A forked child
waits for it to answer and ends. Further arguments of `vllm serve` are the words of the environment
variable ARGS; JSON without blanks needs no quotes there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
# Without a number of its own vLLM's CPU platform takes a share of a NUMA node's memory, and refuses
# to start where other programs use some of it. 2 GiB hold 90,000 tokens of SmolLM2.
DEFAULT_CACHE_GIB = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`model` is a folder or a Hugging Face hub id, `name` what requests call it."""

    model: str
    name: str
    port: int
    is_local: bool
    extra: tuple[str, ...]


def resolve(model: str, port: int, extra: tuple[str, ...]) -> Launch:
    folder = Path(model).expanduser()
    is_local = folder.is_dir()
    if not is_local and model.startswith(("/", ".", "~")):
        raise SystemExit(f"MODEL must be a folder or a hub id, there is no folder {model!r}")
    name = folder.resolve().name if is_local else model
    return Launch(
        model=str(folder) if is_local else model,
        name=name,
        port=port,
        is_local=is_local,
        extra=extra,
    )


def words(arguments: str) -> tuple[str, ...]:
    """The words of a line, in which JSON stays as it is.

    Example: `--flag '{"a": 1}' {"b":2}` -> `--flag`, `{"a": 1}`, `{"b":2}`.
    """
    try:
        found = shlex.split(arguments.replace("\\\n", " "), posix=False)
    except ValueError as error:
        raise SystemExit(f"ARGS must close its quotes ({error}), got {arguments}") from None
    quotes = ("'", '"')
    return tuple(
        word[1:-1] if word[0] in quotes and word[-1] == word[0] else word for word in found
    )


def require_free_port(port: int) -> None:
    """vLLM would say the same in a traceback of thirty lines."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SystemExit(
                f"PORT must be free on {HOST}, {port} is not ({error.strerror}): "
                f"name another, for example `make serve PORT={port + 1}`"
            ) from None


def environment(launch: Launch) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", DEFAULT_CACHE_GIB)
    if launch.is_local:
        environment.setdefault("HF_HUB_OFFLINE", "1")
        environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    return environment


def command(launch: Launch) -> list[str]:
    vllm = str(Path(sys.executable).parent / "vllm")
    serve = [vllm, "serve", launch.model, "--host", HOST, "--port", str(launch.port)]
    serve += ["--served-model-name", launch.name, "--attention-backend", "mstar"]
    if "cpu" in importlib.metadata.version("vllm"):
        # Compiling takes a minute and a C++ compiler; it gains a tenth of the speed.
        serve.append("--enforce-eager")
    return [*serve, *launch.extra]


def request(launch: Launch) -> str:
    """The curl command for a chat, or for a completion where the folder has no chat template."""
    has_chat = not launch.is_local or (Path(launch.model) / "chat_template.jinja").exists()
    body: dict[str, object] = {"model": launch.name, "max_tokens": 64, "temperature": 0}
    if has_chat:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is gravity?"}]
    else:
        path = "completions"
        body["prompt"] = "Gravity is"
    return (
        f"curl http://{HOST}:{launch.port}/v1/{path} \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def announce(launch: Launch, server: int) -> None:
    """Wait until the server answers, and print the request; give up when it has ended."""
    started = time.monotonic()
    while os.getppid() == server:
        if answers(launch.port):
            waited = time.monotonic() - started
            print(f"\n[serve] {launch.name} answers after {waited:.0f} s. Try:\n", flush=True)
            print(request(launch) + "\n\n[serve] Ctrl-C ends the server.\n", flush=True)
            return
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder or a Hugging Face hub id")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    launch = resolve(arguments.model, arguments.port, words(os.environ.get("ARGS", "")))
    require_free_port(launch.port)
    os.chdir(ROOT)
    line = command(launch)
    print(f"[serve] {shlex.join(line)}", flush=True)
    server = os.getpid()
    if os.fork() == 0:
        announce(launch, server)
        os._exit(0)
    os.execve(line[0], line, environment(launch))


if __name__ == "__main__":
    main()
