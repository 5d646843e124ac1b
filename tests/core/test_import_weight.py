"""Declaring a cache must not load what builds it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mstar_plugin.attention import AttentionPath

LOADED = """
import json, sys
import {module}
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_importing(module: str) -> set[str]:
    code = LOADED.format(module=module)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("module", ["mstar_plugin", "mstar_plugin.kv.config", "mstar_plugin.spec"])
def test_declarations_load_neither_torch_nor_a_manager(module: str) -> None:
    loaded = modules_after_importing(module)
    assert not loaded & {"torch", "numpy", "flashinfer", "vllm", "transformers"}
    assert not {name for name in loaded if name.startswith("mstar_plugin") and "manager" in name}


def test_plan_and_attention_load_neither_a_manager_nor_a_kernel() -> None:
    loaded = modules_after_importing("mstar_plugin.kv.plan, mstar_plugin.attention")
    assert not loaded & {"flashinfer", "triton", "mstar_plugin.kv.manager"}
    assert not {f"mstar_plugin.attention.{path.value}" for path in AttentionPath} & loaded


def test_the_package_lists_every_public_name() -> None:
    import mstar_plugin
    from mstar_plugin.kv import config

    assert set(config.__all__) <= set(mstar_plugin.__all__)
    assert all(hasattr(mstar_plugin, name) for name in mstar_plugin.__all__)
