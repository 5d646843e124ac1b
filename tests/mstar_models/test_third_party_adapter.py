"""The example of a third party's adapter, installed by pip and found by its entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_adapter"
CHECKS = """
import json, sys
from mstar_plugin.adapters import find_adapter, load_adapters
from mstar_plugin.testing import check_adapter, check_light_import

adapter = find_adapter(["LlamaForCausalLM"])
check_light_import("bounded_llama")
model = check_adapter(adapter, json.load(open(sys.argv[1])))
print(json.dumps({
    "winner": adapter.name,
    "budget": model.retention.context_budget,
    "prefix": model.retention.protected_prefix,
    "ours_for_others": find_adapter(["Qwen2ForCausalLM"]).name,
    "distributions": sorted({entry.distribution for entry in load_adapters().entries}),
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "adapter"
    target = tmp_path_factory.mktemp("target")
    shutil.copytree(EXAMPLE, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True,
        capture_output=True,
    )
    return target


def run(installed: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_installed_adapter_wins_and_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    config = Path(__file__).parent / "published" / "meta-llama--Llama-3.1-8B.json"
    assert json.loads(run(installed, "-c", CHECKS, str(config))) == {
        "winner": "bounded_llama",
        "budget": 1024,
        "prefix": 64,
        "ours_for_others": "qwen2",
        "distributions": ["bounded-llama-adapter", "mstar-plugin"],
    }


def test_installed_adapter_is_listed_with_its_distribution(installed: Path) -> None:
    rows = json.loads(run(installed, "-m", "mstar_plugin.adapters", "--json"))
    assert {
        "adapter": "bounded_llama",
        "entry_point": "bounded_llama",
        "distribution": "bounded-llama-adapter",
        "architectures": ["LlamaForCausalLM"],
    } in rows
