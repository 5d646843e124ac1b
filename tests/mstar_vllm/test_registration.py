"""Registration: our name is added in every process, and nothing else changes."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import mstar_vllm
from mstar_vllm import compat, plugin

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def registered() -> None:
    mstar_vllm.register()
    mstar_vllm.raise_if_unusable()


def test_registering_again_changes_nothing() -> None:
    platform = type(current_platform)
    before = dict(AttentionBackendEnum.__members__), vars(platform)["check_and_update_config"]
    for _ in range(3):
        mstar_vllm.register()
    assert before == (
        dict(AttentionBackendEnum.__members__),
        vars(platform)["check_and_update_config"],
    )


def test_the_name_is_the_same_everywhere() -> None:
    from mstar_vllm.backend import MStarBackend

    assert MStarBackend.get_name() == plugin.BACKEND_NAME
    member = AttentionBackendEnum[plugin.BACKEND_NAME]
    assert member.get_class() is MStarBackend
    assert AttentionBackendEnum[MStarBackend.get_name()] is member


def test_other_backends_keep_their_classes() -> None:
    cpu = AttentionBackendEnum.CPU_ATTN
    assert cpu.get_path() == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    others = [m for m in AttentionBackendEnum if m.name != plugin.BACKEND_NAME]
    assert not any(member.is_overridden() for member in others)


def test_a_taken_name_is_a_conflict_that_names_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_BACKEND_PATH", "somebody.else.Backend")
    mstar_vllm.register()
    with pytest.raises(RuntimeError, match="taken by mstar_vllm.backend.MStarBackend"):
        mstar_vllm.raise_if_unusable()


def test_a_configuration_is_unpickled_where_plugins_are_not_loaded_yet() -> None:
    sent = pickle.dumps({"backend": AttentionBackendEnum[plugin.BACKEND_NAME]})
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['backend'].name)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().split()[-1] == plugin.BACKEND_NAME


def test_stock_members_pickle_to_themselves() -> None:
    member = AttentionBackendEnum.CPU_ATTN
    assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
def test_a_supported_engine_passes(version: str) -> None:
    compat.check_engine_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev", ""])
def test_another_engine_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32, 0\.33, found"):
        compat.check_engine_version(version)


def test_a_failed_registration_is_silent_until_the_backend_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise ImportError("no module named flash")

    monkeypatch.setattr(plugin, "install", broken)
    mstar_vllm.register()
    with pytest.raises(RuntimeError, match="no module named flash"):
        mstar_vllm.raise_if_unusable()


# What the plugin overrides, wraps or reads; a release that changes one of these needs a look.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks": (
        "self",
        "request_id",
        "processed_computed_tokens",
        "num_prompt_tokens",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": (
        "self",
        "request",
        "num_tokens",
        "retention_interval",
        "replay_boundaries",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.find_longest_cache_hit": (
        "block_hashes",
        "max_length",
        "kv_cache_group_ids",
        "block_pool",
        "kv_cache_spec",
        "drop_eagle_block",
        "alignment_tokens",
        "dcp_world_size",
        "pcp_world_size",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free": (
        "self",
        "request_id",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks": (
        "self",
        "request_id",
        "num_tokens",
        "num_tokens_main_model",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": ("self", "request"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec": ("self",),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.sample_tokens": ("self", "grammar_output"),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": (
        "self",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ),
    "vllm.v1.attention.backend:AttentionBackend.customize_spec": ("spec",),
    "vllm.platforms.interface:Platform.check_and_update_config": ("vllm_config",),
    "vllm.platforms.interface:Platform.register_custom_kv_cache_specs": ("vllm_config",),
    "vllm.platforms.interface:Platform.get_attn_backend_cls": (
        "selected_backend",
        "attn_selector_config",
        "num_heads",
    ),
}


def resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = __import__(module, fromlist=["_"])
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_engine_has_the_signatures_the_plugin_was_written_for(path: str) -> None:
    assert tuple(inspect.signature(resolve(path)).parameters) == SIGNATURES[path]


def test_the_batch_has_the_fields_the_transform_writes() -> None:
    fields = set(CommonAttentionMetadata.__dataclass_fields__)
    written = {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "num_reqs",
        "max_query_len",
        "max_seq_len",
        "block_table_tensor",
        "is_prefilling",
        "causal",
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
    }
    assert written <= fields


def test_validation_takes_what_the_selector_gives() -> None:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    known = set(inspect.signature(AttentionBackend.validate_configuration).parameters)
    assert set(AttentionSelectorConfig._fields) <= known
