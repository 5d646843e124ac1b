"""The registry, the groups, the configuration reader and the command, without any model family."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.adapters import (
    GENERIC_ADAPTER,
    Adapter,
    AdapterRegistry,
    DecoderAdapter,
    HFConfig,
    RegisteredAdapter,
    adapter_for,
    find_adapter,
    kv_groups,
    load_registry,
)
from mstar_plugin.adapters.__main__ import main
from mstar_plugin.adapters.report import Sizing, model_cost
from mstar_plugin.adapters.tables import human_bytes, index_ranges
from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV, Rotary

TINY: Mapping[str, Any] = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}


def registered(distribution: str, *architectures: str, name: str = "it") -> RegisteredAdapter:
    adapter = DecoderAdapter(name=name, architectures=architectures)
    return RegisteredAdapter(adapter=adapter, entry_point=name, distribution=distribution)


def layer(index: int, kind: LayerKind = LayerKind.FULL, **changes: Any) -> LayerKV:
    shape: dict[str, Any] = {"num_kv_heads": 2, "num_qo_heads": 4, "head_dim": 16, **changes}
    return LayerKV(index=index, kind=kind, **shape)


def test_an_adapter_of_another_distribution_wins_over_ours() -> None:
    ours, theirs = registered("mstar-plugin", "A", "B"), registered("theirs", "A")
    registry = AdapterRegistry(entries=(ours, theirs))
    assert registry.find(["A"]) is theirs
    assert registry.find(["B"]) is ours


def test_two_other_distributions_clash_only_over_what_both_speak_for() -> None:
    registry = AdapterRegistry(
        entries=(registered("one", "A", "B", name="x"), registered("two", "A", name="y"))
    )
    assert registry.find(["B"]) is registry.entries[0]
    with pytest.raises(ValueError, match="adapters for A .* 'x' of one, 'y' of two: uninstall"):
        registry.find(["A"])


def test_two_adapters_of_ours_clash_too() -> None:
    entries = (registered("mstar-plugin", "A", name="x"), registered("mstar-plugin", "A", name="y"))
    with pytest.raises(ValueError, match="'x' of mstar-plugin, 'y' of mstar-plugin"):
        AdapterRegistry(entries=entries).find(["A"])


def test_the_first_architecture_somebody_speaks_for_decides() -> None:
    one, two = registered("mstar-plugin", "A"), registered("mstar-plugin", "B")
    registry = AdapterRegistry(entries=(one, two))
    assert registry.find(["Unknown", "B", "A"]) is two
    assert registry.find(["Unknown"]) is None
    assert registry.find([]) is None


def entry_point(value: str) -> EntryPoint:
    point = EntryPoint(name="broken", value=value, group="mstar_plugin.adapters")
    vars(point).update(dist=SimpleNamespace(name="their-package"))
    return point


def test_an_adapter_that_cannot_be_imported_is_named_with_its_distribution() -> None:
    with pytest.raises(ImportError, match="adapter 'broken' of their-package must be importable"):
        load_registry([entry_point("no_such_module_anywhere:ADAPTER")])


def test_an_entry_point_that_is_no_adapter_is_named() -> None:
    with pytest.raises(TypeError, match=r"'broken' of their-package must be an mstar_plugin"):
        load_registry([entry_point("json:loads")])


def test_an_unknown_architecture_gets_the_generic_adapter() -> None:
    assert find_adapter(["NobodyForCausalLM"]) is None
    assert adapter_for(["NobodyForCausalLM"]) is GENERIC_ADAPTER


class HandWritten(Adapter):
    """An adapter without the declarative base."""

    name = "hand_written"
    architectures = ("HandWritten",)

    def declare(self, hf_config: HFConfig) -> ModelKV:
        return ModelKV(
            architecture="HandWritten",
            layers=(layer(0), layer(1, LayerKind.SLIDING, window_tokens=8)),
            max_positions=64,
            retention=RetentionPolicy(context_budget=32),
        )


def test_a_hand_written_adapter_gets_specs_and_layouts_from_its_declaration() -> None:
    specs = HandWritten().kv_specs({})
    assert [(spec.resource_key, spec.config.num_layers) for spec in specs] == [
        ("full", 1),
        ("sliding_8", 1),
    ]
    layouts = HandWritten().layouts({}, prompt_tokens=10)
    assert layouts["full"]["main"].retention == RetentionPolicy(context_budget=32)
    assert layouts["sliding_8"]["main"].retention is None
    assert layouts["full"]["main"].positions({"decode": 5}) == 15


def test_a_policy_of_the_caller_wins_over_the_declared_one() -> None:
    policy = RetentionPolicy(context_budget=16, protected_prefix=4)
    layouts = HandWritten().layouts({}, prompt_tokens=10, retention=policy)
    assert layouts["full"]["main"].retention == policy


def test_layouts_refuse_a_policy_with_the_models_reason() -> None:
    config = {**TINY, "alibi": True}
    with pytest.raises(ValueError, match="retention must be left out for TinyForCausalLM: ALiBi"):
        GENERIC_ADAPTER.layouts(config, prompt_tokens=8, retention=RetentionPolicy(64))


def test_specs_need_a_bound_from_somewhere() -> None:
    config = {key: value for key, value in TINY.items() if key != "max_position_embeddings"}
    with pytest.raises(ValueError, match="max_seq_len must be given for TinyForCausalLM"):
        GENERIC_ADAPTER.kv_specs(config)
    assert GENERIC_ADAPTER.kv_specs(config, max_seq_len=99)[0].config.max_seq_len == 99


def test_a_configuration_object_and_a_read_only_mapping_read_alike() -> None:
    as_object = SimpleNamespace(to_dict=lambda: dict(TINY))
    assert GENERIC_ADAPTER.declare(as_object) == GENERIC_ADAPTER.declare(MappingProxyType(TINY))


@pytest.mark.parametrize("wrong", [None, 5, "config.json", ["x"]])
def test_other_kinds_of_configuration_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="hf_config must be a mapping or have to_dict"):
        GENERIC_ADAPTER.declare(wrong)


def test_layers_of_one_storage_form_a_group_and_sharing_layers_none() -> None:
    model = ModelKV(
        architecture="X",
        layers=(
            layer(0, LayerKind.SLIDING, window_tokens=8),
            layer(1),
            layer(2, LayerKind.SLIDING, window_tokens=8),
            layer(3, num_kv_heads=1),
            layer(4, shares_kv_with=1),
        ),
    )
    groups = kv_groups(model)
    assert [group.key for group in groups] == ["sliding_8", "full", "full_1x16"]
    assert [[x.index for x in group.layers] for group in groups] == [[0, 2], [1], [3]]
    assert sum(group.elements_per_token for group in groups) == model.elements_per_token


@pytest.mark.parametrize(("bound", "keys"), [(128, ["full"]), (129, ["full", "sliding_128"])])
def test_windows_that_reach_the_longest_stream_are_full(bound: int, keys: list[str]) -> None:
    model = ModelKV(
        architecture="X", layers=(layer(0), layer(1, LayerKind.SLIDING, window_tokens=128))
    )
    assert [group.key for group in kv_groups(model, max_seq_len=bound)] == keys


@given(
    st.lists(
        st.tuples(st.sampled_from([None, 8, 16]), st.sampled_from([1, 2, 4]), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_groups_partition_the_storing_layers(rows: list[tuple[int | None, int, bool]]) -> None:
    layers = tuple(
        layer(
            index,
            LayerKind.FULL if window is None else LayerKind.SLIDING,
            window_tokens=window,
            num_kv_heads=heads,
            shares_kv_with=0 if shares and index else None,
        )
        for index, (window, heads, shares) in enumerate(rows)
    )
    model = ModelKV(architecture="X", layers=layers)
    groups = kv_groups(model)
    assert len({group.key for group in groups}) == len(groups)
    grouped = sorted(x.index for group in groups for x in group.layers)
    assert grouped == [x.index for x in model.storing_layers]
    assert sum(group.elements_per_token for group in groups) == model.elements_per_token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads of layer 0 must be positive, got 0"),
        ({"num_kv_heads": 3}, "num_qo_heads of layer 0 must be a multiple of num_kv_heads"),
        ({"window_tokens": 8}, "window_tokens of layer 0 must be given for sliding and chunked"),
        ({"kind": LayerKind.SLIDING}, "window_tokens of layer 0 must be given"),
        ({"kind": LayerKind.SLIDING, "window_tokens": 0}, "window_tokens of layer 0 must be pos"),
        ({"shares_kv_with": 0}, "shares_kv_with of layer 0 must name an earlier layer, got 0"),
        ({"kv_lora_rank": 8}, "kv_lora_rank of layer 0 is for MLA layers, got 8"),
        ({"kind": LayerKind.MLA}, "layer 0 is MLA: one KV head of kv_lora_rank"),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(0, **changes)


def test_a_model_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers must ascend by index .* got \[1, 0\]"):
        ModelKV(architecture="X", layers=(layer(1), layer(0)))
    with pytest.raises(ValueError, match="shares_kv_with of layer 3 must name a layer with KV"):
        ModelKV(architecture="X", layers=(layer(0), layer(3, shares_kv_with=2)))
    with pytest.raises(ValueError, match="retention must be left out where it is refused"):
        ModelKV(
            architecture="X",
            layers=(layer(0),),
            retention=RetentionPolicy(8),
            retention_refusal="no",
        )


def test_rotary_settings_are_checked_and_hashable() -> None:
    with pytest.raises(ValueError, match="theta must be positive, got 0"):
        Rotary(theta=0, rotary_dim=8)
    with pytest.raises(ValueError, match="rotary_dim must be even and positive, got 7"):
        Rotary(theta=1e4, rotary_dim=7)
    with pytest.raises(TypeError, match="unhashable"):
        Rotary(theta=1e4, rotary_dim=8, parameters=(("factors", [1, 2]),))
    assert hash(layer(0, rotary=Rotary(theta=1e4, rotary_dim=8)))


def cost_of(config: Mapping[str, Any], **changes: Any) -> Any:
    sizing: dict[str, Any] = {
        "stream_tokens": 1000,
        "page_size": 16,
        "step_tokens": 32,
        "dtype": "bfloat16",
        **changes,
    }
    model = GENERIC_ADAPTER.declare(config)
    return model_cost(model, adapter="generic", sizing=Sizing(**sizing))


def test_cost_counts_whole_pages_of_a_stream() -> None:
    cost = cost_of(TINY)
    assert cost.bytes_per_token == 4 * 2 * 2 * 16 * 2
    assert [group.pages for group in cost.groups] == [63]
    assert cost.stream_bytes == 63 * 16 * cost.bytes_per_token
    assert cost.retained_bytes is None


def test_cost_of_retention_follows_the_retention_arithmetic() -> None:
    policy = RetentionPolicy(context_budget=128, protected_prefix=32)
    cost = cost_of(TINY, retention=policy, page_size=32, step_tokens=64)
    assert [group.retained_pages for group in cost.groups] == [8]
    assert cost.retained_bytes == 8 * 32 * cost.bytes_per_token


def test_a_stream_shorter_than_the_window_costs_no_more_than_its_pages() -> None:
    policy = RetentionPolicy(context_budget=4096)
    cost = cost_of(TINY, retention=policy)
    assert cost.retained_bytes == cost.stream_bytes


def test_sliding_layers_hold_their_window_whatever_the_policy() -> None:
    config = {
        **TINY,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    sliding, full = cost_of(config, retention=RetentionPolicy(256)).groups
    assert sliding.pages == sliding.retained_pages == 7
    assert full.retained_pages < full.pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"stream_tokens": -1}, "stream_tokens must be at least 1, got -1"),
        ({"dtype": "int3"}, "dtype must be one of .*, got int3"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_of(TINY, **changes)


def test_index_ranges_and_sizes_read_well() -> None:
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert index_ranges([]) == ""
    assert human_bytes(14 * 2**20) == "14.0 MiB"
    assert human_bytes(512) == "512 B"
    assert human_bytes(3 * 2**40) == "3.0 TiB"
    assert human_bytes(None) == "-"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "torch_dtype": "float32"}))
    return tmp_path


def test_command_reports_a_model_folder_and_its_file_alike(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model_folder)]) == 0
    table = capsys.readouterr().out
    assert "TinyForCausalLM, adapter generic, 4 layers with KV" in table
    assert "1024 bytes per token in float32" in table
    assert main([str(model_folder / "config.json")]) == 0
    assert capsys.readouterr().out == table


def test_command_prints_json_with_what_retention_would_cost(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--context-budget", "64", "--protected-prefix", "8", "--page-size", "32"]
    assert main([str(model_folder), *options, "--step-tokens", "16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["adapter"] == "generic"
    assert report["groups"][0]["retained_pages"] == 4
    assert report["retained_bytes"] == 4 * 32 * report["bytes_per_token"]
    assert [row["index"] for row in report["layers"]] == [0, 1, 2, 3]


def test_command_says_why_retention_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "alibi": True}))
    assert main([str(tmp_path), "--context-budget", "64"]) == 0
    assert "retention is refused: ALiBi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "path must be a config.json or a folder with one"),
        ("{", [], "must be JSON"),
        ("[]", [], "must hold a mapping, got list"),
        ("{}", [], "num_hidden_layers must be in the config of unknown"),
        (json.dumps(TINY), ["--context-budget", "0"], "context_budget must be"),
        (json.dumps(TINY), ["--protected-prefix", "4"], "--context-budget must be given with"),
        (json.dumps(TINY), ["--page-size", "0"], "page_size must be at least 1"),
    ],
)
def test_command_fails_with_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    options: list[str],
    message: str,
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main([str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_command_lists_adapters_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mstar_plugin.adapters", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {row["adapter"]: row for row in json.loads(done.stdout)}
    assert rows["llama"]["distribution"] == "mstar-plugin"
    assert "LlamaForCausalLM" in rows["llama"]["architectures"]


def test_a_python_without_adapters_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "mstar_plugin.adapters.__main__.load_adapters", lambda: AdapterRegistry(entries=())
    )
    assert main([]) == 2
    assert f"must be installed where its adapters are asked for, got {sys.executable}" in (
        capsys.readouterr().err
    )
