"""What a user installs: names, entry points, weight of the import."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = {"mstar_plugin": ".", "mstar_vllm": "integrations", "mstar_models": "models"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRY_POINTS = [
    (group, name)
    for group, names in PROJECT["project"]["entry-points"].items()
    for name in sorted(names)
]


def run_python(code: str, **extra_environment: str) -> str:
    import os

    environment = {**os.environ, **extra_environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


@pytest.mark.parametrize(("group", "name"), ENTRY_POINTS)
def test_entry_point_loads(group: str, name: str) -> None:
    (entry_point,) = importlib.metadata.entry_points(group=group, name=name)
    assert entry_point.load() is not None


def test_registered_entry_points_are_those_of_pyproject() -> None:
    """`make env` must have run since the table was edited."""
    distribution = importlib.metadata.distribution("mstar-plugin")
    registered = sorted((point.group, point.name) for point in distribution.entry_points)
    assert registered == sorted(ENTRY_POINTS)


@pytest.mark.parametrize("package", SOURCE_ROOTS)
def test_importing_the_package_pulls_in_neither_torch_nor_an_engine(package: str) -> None:
    loaded = json.loads(
        run_python(f"import json, sys, {package}; print(json.dumps(list(sys.modules)))")
    )
    assert not {"torch", "vllm", "transformers", "numpy"} & set(loaded)


@pytest.mark.parametrize("package", SOURCE_ROOTS)
def test_every_name_in_all_exists(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


def test_core_lists_all_its_public_names() -> None:
    import mstar_plugin

    submodules = {path.stem for path in (ROOT / "mstar_plugin").iterdir()}
    public = {name for name in vars(mstar_plugin) if not name.startswith("_")} - submodules
    assert public == set(mstar_plugin.__all__)


def test_wheel_installs_only_our_three_names(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    version = PROJECT["project"]["version"]
    assert names == {*SOURCE_ROOTS, f"mstar_plugin-{version}.dist-info"}


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT / root).as_posix()
        for package, root in SOURCE_ROOTS.items()
        for path in (ROOT / root / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert packed == sources
    assert {f"{package}/py.typed" for package in SOURCE_ROOTS} <= packed


def test_wheel_carries_licence_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


def test_installed_wheel_imports_without_the_checkout(installed: Path) -> None:
    code = "import mstar_plugin, mstar_vllm, mstar_models; print(mstar_vllm.__file__)"
    assert run_python(code, PYTHONPATH=str(installed)).startswith(str(installed))
