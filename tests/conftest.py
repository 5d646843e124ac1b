"""What every test starts from: a fixed seed, the models, and a reason for each skip."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"


def load_script(name: str) -> ModuleType:
    """A module of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"scripts_{name}", ROOT / "scripts" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_marked(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def missing_for(item: pytest.Item) -> str | None:
    if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
        return "needs a CUDA card, nvidia-smi is not here"
    needs_engine = item.get_closest_marker("vllm") or item.get_closest_marker("server")
    if needs_engine and importlib.util.find_spec("vllm") is None:
        return "needs vLLM, run `make env`"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers or engines come first, so that the workers end together."""
    items.sort(key=lambda item: (not is_marked(item, "server"), not is_marked(item, "slow")))
    for item in items:
        reason = missing_for(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def require_model(name: str, target: str) -> Path:
    folder = MODELS / name
    if not folder.exists():
        # A missing model must not turn a CI run green.
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent(f"needs .models/{name}, run `make {target}`")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return require_model("SmolLM2-135M-Instruct", "model")


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    return require_model("gemma-3-270m", "model-gemma")


@pytest.fixture(scope="session")
def tiny_model(smollm2: Path) -> Callable[[str], Path]:
    """`tiny_model("llama-14-2")` is the folder of a tiny model, see scripts/tiny_models.py."""
    build: Callable[[str], Path] = load_script("tiny_models").build
    return build


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    return load_script
