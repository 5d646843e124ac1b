"""What an adapter must keep to, as checks that its author can run.

    from mstar_plugin.testing import check_adapter, check_light_import

    def test_my_adapter():
        check_light_import("my_package")
        check_adapter(ADAPTER, json.loads(Path("config.json").read_text()))

Every failure is an AssertionError that states the rule and what was found.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mstar_plugin.adapters.hf_config import NESTED_TEXT_KEYS, architectures_of
from mstar_plugin.adapters.registry import load_adapters
from mstar_plugin.kv.config import PagedKVConfig, RingKVConfig
from mstar_plugin.model_kv import ModelKV

if TYPE_CHECKING:
    from mstar_plugin.adapters.interface import Adapter
    from mstar_plugin.adapters.registry import RegisteredAdapter

HEAVY_MODULES = ("transformers", "vllm", "sglang", "flashinfer")
DECLARE_SECONDS = 0.1
WRONG_VALUES: tuple[object, ...] = (None, "seven", -1, True, 1.5, [], {})


def registered_adapters() -> tuple[RegisteredAdapter, ...]:
    """Every installed adapter, to parametrise a test over."""
    return load_adapters().entries


def check_adapter(adapter: Adapter, hf_config: Mapping[str, Any]) -> ModelKV:
    """Run every check of the contract on one configuration of `adapter`; returns its declaration.

    `hf_config` is the content of a real `config.json` that names one of its architectures.
    """
    check_identity(adapter)
    named = architectures_of(hf_config)
    assert set(named) & set(adapter.architectures), (
        f"hf_config must name one of {adapter.architectures}, got {named}"
    )
    model = check_pure(adapter, hf_config)
    check_specs(adapter, hf_config, model)
    check_layouts(adapter, hf_config, model)
    check_errors(adapter, hf_config)
    check_fast(adapter, hf_config)
    return model


def check_identity(adapter: Adapter) -> None:
    """A name, and distinct architecture names in a tuple."""
    assert isinstance(adapter.name, str) and adapter.name, (
        f"name must be a non-empty string, got {adapter.name!r}"
    )
    architectures = adapter.architectures
    assert isinstance(architectures, tuple) and architectures, (
        f"architectures must be a non-empty tuple, got {architectures!r}"
    )
    assert all(isinstance(a, str) and a for a in architectures), (
        f"architectures must be non-empty strings, got {architectures!r}"
    )
    assert len(set(architectures)) == len(architectures), (
        f"architectures must be distinct, got {architectures!r}"
    )


def check_pure(adapter: Adapter, hf_config: Mapping[str, Any]) -> ModelKV:
    """Same answer each time, for a mapping as for an object; nothing is changed."""
    before = copy.deepcopy(dict(hf_config))
    model = adapter.declare(MappingProxyType(dict(hf_config)))
    assert isinstance(model, ModelKV), f"declare must return a ModelKV, got {type(model).__name__}"
    assert adapter.declare(hf_config) == model, "declare must give the same answer for one config"
    assert adapter.declare(_AsObject(before)) == model, (
        "declare must treat a configuration object like the mapping of its to_dict()"
    )
    assert dict(hf_config) == before, "declare must not change the configuration"
    assert model.layers or model.ring is not None, "declare must find layers with KV, got none"
    return model


def check_specs(adapter: Adapter, hf_config: Mapping[str, Any], model: ModelKV) -> None:
    """The specs hold every storing layer once, and as many elements per token as the layers."""
    specs = adapter.kv_specs(hf_config, max_seq_len=model.max_positions or 4096)
    keys = [spec.resource_key for spec in specs]
    assert len(set(keys)) == len(keys), f"kv_specs must have distinct keys, got {keys}"
    if model.ring is not None:
        configs = [spec.config for spec in specs]
        assert any(isinstance(config, RingKVConfig) for config in configs), (
            f"kv_specs of a ring model must hold its ring, got {configs}"
        )
        return
    paged = [spec.config for spec in specs if isinstance(spec.config, PagedKVConfig)]
    assert sum(config.num_layers for config in paged) == len(model.storing_layers), (
        f"kv_specs must hold each of {len(model.storing_layers)} storing layers once, got {paged}"
    )
    elements = sum(config.page_bytes(1) // config.page_size for config in paged)
    assert elements == model.elements_per_token, (
        f"kv_specs must store {model.elements_per_token} elements per token, got {elements}"
    )


def check_layouts(adapter: Adapter, hf_config: Mapping[str, Any], model: ModelKV) -> None:
    """Layouts name known resources and hold the prompt."""
    if model.ring is not None:
        return
    prompt_tokens = 40
    bound = model.max_positions or 4096
    specs = adapter.kv_specs(hf_config, max_seq_len=bound)
    layouts = adapter.layouts(hf_config, prompt_tokens=prompt_tokens, max_seq_len=bound)
    unknown = set(layouts) - {spec.resource_key for spec in specs}
    assert not unknown, f"layouts must name resources of kv_specs, got {sorted(unknown)} besides"
    for key, labels in layouts.items():
        assert labels, f"layouts of {key} must have a label, got none"
        for label, layout in labels.items():
            assert layout.slots({}) >= prompt_tokens, (
                f"layout {label!r} of {key} must hold a prompt of {prompt_tokens} tokens, "
                f"got {layout.slots({})}"
            )


def check_errors(adapter: Adapter, hf_config: Mapping[str, Any]) -> None:
    """A missing or wrong value gives a declaration or a ValueError with text, and nothing else."""
    for change, config in _broken_configs(hf_config):
        try:
            adapter.declare(config)
        except ValueError as error:
            assert str(error), f"declare must say what is wrong when {change}"
        except Exception as error:
            raise AssertionError(
                f"declare must raise ValueError when {change}, got {error!r}"
            ) from error


def check_fast(adapter: Adapter, hf_config: Mapping[str, Any]) -> None:
    """The best of five declarations takes under `DECLARE_SECONDS`."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        adapter.declare(hf_config)
        best = min(best, time.perf_counter() - started)
    assert best < DECLARE_SECONDS, (
        f"declare must take under {DECLARE_SECONDS} seconds, took {best:.3f}"
    )


def check_light_import(module: str) -> None:
    """Importing `module` in a fresh interpreter loads no engine and no model library."""
    script = (
        f"import sys, {module}; print(*[name for name in {HEAVY_MODULES!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{module} must be importable, got {done.stderr.strip()}"
    assert not done.stdout.strip(), f"{module} must not import {done.stdout.strip()}"


class _AsObject:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._values))


def _broken_configs(hf_config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in hf_config:
        if key in NESTED_TEXT_KEYS and isinstance(hf_config[key], Mapping):
            for change, nested in _broken_configs(hf_config[key]):
                yield f"{change} below {key}", {**hf_config, key: nested}
        yield f"{key} is missing", {k: v for k, v in hf_config.items() if k != key}
        for value in WRONG_VALUES:
            yield f"{key} is {value!r}", {**hf_config, key: value}
