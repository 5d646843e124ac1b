"""The adapter contract, over every registered entry point and every published configuration."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mstar_models.waypoint import ring_config
from mstar_plugin.adapters import RegisteredAdapter, find_adapter
from mstar_plugin.model_kv import LayerKind
from mstar_plugin.testing import (
    check_adapter,
    check_light_import,
    check_pure,
    check_specs,
    registered_adapters,
)

CONFIGS: list[dict[str, Any]] = [
    json.loads(file.read_text())
    for file in sorted((Path(__file__).parent / "published").glob("*.json"))
]
PRUNED_NEMOTRON = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "block_configs": [
        {"attention": {"no_op": False, "n_heads_in_group": 8}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {"no_op": False, "n_heads_in_group": 4}},
    ],
}
WAYPOINT = {"architectures": ["WaypointWorldModel"], "tokens_per_frame": 128}
FRAME_DECODER = {
    "architectures": ["FrameDecoderForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "mstar": {"ring": {"tokens_per_frame": 16, "layers": {"ring_buckets": 4}}},
}
COSMOS3 = {
    "architectures": ["Cosmos3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
}
CONFIGS.extend([PRUNED_NEMOTRON, WAYPOINT, FRAME_DECODER, COSMOS3])


def configs_of(entry: RegisteredAdapter) -> list[dict[str, Any]]:
    return [c for c in CONFIGS if c["architectures"][0] in entry.adapter.architectures]


@pytest.mark.parametrize("entry", registered_adapters(), ids=lambda entry: entry.entry_point)
def test_registered_adapter_keeps_the_contract(entry: RegisteredAdapter) -> None:
    configs = configs_of(entry)
    assert configs, f"no configuration to check {entry} with"
    check_adapter(entry.adapter, configs[0])
    for config in configs[1:]:
        check_specs(entry.adapter, config, check_pure(entry.adapter, config))


@pytest.mark.parametrize("entry", registered_adapters(), ids=lambda entry: entry.entry_point)
def test_entry_point_is_named_after_its_adapter_and_reachable(entry: RegisteredAdapter) -> None:
    assert entry.entry_point == entry.adapter.name
    for architecture in entry.adapter.architectures:
        assert find_adapter([architecture]) is entry.adapter


def test_importing_adapters_loads_no_engine() -> None:
    modules = [
        f"mstar_models.{file.stem}"
        for file in Path(importlib.util.find_spec("mstar_models").origin).parent.glob("*.py")
    ]
    check_light_import(", ".join(["mstar_plugin.adapters", "mstar_plugin.testing", *modules]))


def test_pruned_layers_have_heads_of_their_own() -> None:
    adapter = find_adapter(PRUNED_NEMOTRON["architectures"])
    layers = adapter.declare(PRUNED_NEMOTRON).layers
    assert [(x.index, x.num_kv_heads, x.num_qo_heads) for x in layers] == [(0, 2, 16), (2, 4, 16)]


def test_waypoint_declares_the_ring_of_its_presets() -> None:
    model = find_adapter(WAYPOINT["architectures"]).declare(WAYPOINT)
    assert model.ring == ring_config("360p")
    assert {layer.kind for layer in model.layers} == {LayerKind.RING}
    assert model.retention_refusal is not None
