"""Geometry, deployment overrides and sharding of the two KV configs."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_plugin.kv.config import (
    KVConfig,
    KVLayout,
    KVSpec,
    KVStep,
    PagedKVConfig,
    RetentionPolicy,
    RingKVConfig,
    RingKVLayerConfig,
    RingKVStep,
)
from mstar_plugin.step import Segment


def paged(**changes: Any) -> PagedKVConfig:
    values: dict[str, Any] = {
        "num_layers": 28,
        "num_kv_heads": 8,
        "head_dim": 128,
        "num_qo_heads": 32,
        "max_seq_len": 4096,
    }
    return PagedKVConfig(**(values | changes))


def latent(**changes: Any) -> PagedKVConfig:
    values: dict[str, Any] = {
        "layout": KVLayout.MLA,
        "num_kv_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    return paged(**(values | changes))


def ring(**changes: Any) -> RingKVConfig:
    values: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 8,
        "head_dim": 64,
        "tokens_per_frame": 256,
        "layers": (RingKVLayerConfig(8, 4, 2), RingKVLayerConfig(4, 4, 1)),
    }
    return RingKVConfig(**(values | changes))


def test_the_base_config_is_abstract_and_keyword_only() -> None:
    with pytest.raises(TypeError, match="apply_yaml_overrides"):
        KVConfig(num_layers=1, num_kv_heads=1, head_dim=1)  # type: ignore[abstract]
    with pytest.raises(TypeError):
        PagedKVConfig(28, 8, 128, None, 4096)  # type: ignore[call-arg]


def test_query_heads_default_to_kv_heads() -> None:
    assert paged(num_qo_heads=None).num_qo_heads == 8


def test_paged_defaults() -> None:
    config = paged()
    assert (config.max_num_pages, config.page_size, config.layout) == (2048, 128, KVLayout.NHD)
    assert (config.cpu_offload_pages, config.prefix_cache_salt) == (0, "")
    assert (config.prefix_cache, config.prefix_cache_tp) == (True, False)
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (None, None)


def test_layouts_are_named_after_their_axes() -> None:
    assert [layout.value for layout in KVLayout] == ["MLA", "NHD"]
    assert paged(layout="NHD").layout is KVLayout.NHD
    with pytest.raises(ValueError, match="HND"):
        paged(layout="HND")


@pytest.mark.parametrize(
    ("num_shards", "kv_heads", "qo_heads"), [(1, 8, 32), (2, 4, 16), (8, 1, 4), (16, 1, 2)]
)
def test_shard_narrows_the_heads_and_replicates_what_runs_out(
    num_shards: int, kv_heads: int, qo_heads: int
) -> None:
    config = paged()
    config.shard(num_shards)
    assert (config.num_kv_heads, config.num_qo_heads) == (kv_heads, qo_heads)


def test_shard_starts_from_the_model_every_time() -> None:
    config = paged()
    for num_shards, expected in [(2, (4, 16)), (2, (4, 16)), (4, (2, 8)), (1, (8, 32))]:
        config.shard(num_shards)
        assert (config.num_kv_heads, config.num_qo_heads) == expected


@pytest.mark.parametrize(
    ("kv_heads", "qo_heads", "num_shards", "message"),
    [
        (8, 32, 3, "num_kv_heads=8 does not divide into 3 shards"),
        (6, 24, 4, "num_kv_heads=6 does not divide into 4 shards"),
        (8, 24, 16, "num_qo_heads=24 does not divide into 16 shards"),
    ],
)
def test_heads_that_do_not_divide_are_refused_and_leave_the_config_alone(
    kv_heads: int, qo_heads: int, num_shards: int, message: str
) -> None:
    config = paged(num_kv_heads=kv_heads, num_qo_heads=qo_heads)
    with pytest.raises(AssertionError, match=message):
        config.shard(num_shards)
    assert (config.num_kv_heads, config.num_qo_heads) == (kv_heads, qo_heads)


def test_an_override_after_sharding_does_not_change_the_baseline() -> None:
    config = paged()
    config.shard(2)
    config.apply_yaml_overrides(max_seq_len=99)
    config.shard(4)
    assert (config.num_kv_heads, config.num_qo_heads, config.max_seq_len) == (2, 8, 99)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_pages", 7),
        ("page_size", 16),
        ("max_seq_len", 512),
        ("cpu_offload_pages", 0),
        ("prefix_cache_salt", ""),
        ("prefix_cache", False),
        ("prefix_cache_tp", True),
    ],
)
def test_each_deployment_key_applies_and_none_leaves_it(key: str, value: Any) -> None:
    config = paged(cpu_offload_pages=5, prefix_cache_salt="x")
    before = getattr(config, key)
    config.apply_yaml_overrides(**{key: None})
    assert getattr(config, key) == before
    config.apply_yaml_overrides(**{key: value})
    assert getattr(config, key) == value


@pytest.mark.parametrize("key", ["num_layers", "head_dim", "layout", "num_sessions", "page_sise"])
def test_geometry_and_typos_are_no_deployment_keys(key: str) -> None:
    with pytest.raises(TypeError, match=key):
        KVSpec("kv", {"n"}, paged()).apply_yaml_overrides(**{key: 1})


def test_a_refused_override_changes_nothing() -> None:
    config = paged()
    with pytest.raises(ValueError, match=r"page_size must be .* at least 1, got 0"):
        config.apply_yaml_overrides(max_num_pages=9, page_size=0)
    assert config == paged()


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_num_pages", 1), ("page_size", True), ("max_seq_len", -1), ("head_dim", 1.5)],
)
def test_sizes_must_be_positive_integers(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} must be an integer of at least"):
        paged(**{key: value})


def test_mla_takes_its_geometry_from_the_latent() -> None:
    config = latent()
    assert (config.num_kv_heads, config.head_dim, config.latent_dim) == (1, 576, 576)


@pytest.mark.parametrize("missing", ["kv_lora_rank", "qk_rope_head_dim"])
def test_mla_needs_both_latent_sizes(missing: str) -> None:
    with pytest.raises(ValueError, match="both kv_lora_rank and qk_rope_head_dim"):
        latent(**{missing: None})


def test_latent_dim_belongs_to_mla() -> None:
    with pytest.raises(AssertionError, match="NHD"):
        _ = paged().latent_dim


def test_mla_replicates_kv_and_shards_query_heads() -> None:
    config = latent()
    config.shard(8)
    assert (config.num_kv_heads, config.head_dim, config.num_qo_heads) == (1, 576, 4)


def test_a_config_knows_whether_query_heads_were_given() -> None:
    assert latent().qo_heads_given
    assert not latent(num_qo_heads=None).qo_heads_given
    with pytest.raises(TypeError, match="qo_heads_given"):
        paged(qo_heads_given=True)


def test_page_bytes() -> None:
    assert paged().page_bytes(2) == 14 << 20
    assert paged().page_bytes(2) * 2048 == 28 << 30
    assert latent(num_layers=1).page_bytes(2) == 128 * 576 * 2


def test_pool_shapes() -> None:
    assert paged(max_num_pages=4).pool_shape == (28, 4, 2, 128, 8, 128)
    assert latent(max_num_pages=4).pool_shape == (28, 4, 128, 576)


def test_a_ring_has_one_session_for_padding() -> None:
    assert ring().total_sessions == 2
    assert ring(num_sessions=4).total_sessions == 5


def test_a_ring_needs_one_geometry_per_layer() -> None:
    with pytest.raises(ValueError, match=r"num_layers=3 ring geometries, got 2"):
        ring(num_layers=3)


@pytest.mark.parametrize("num_sessions", [0, -1, 1.0, "2", True])
def test_sessions_must_be_a_positive_int(num_sessions: Any) -> None:
    with pytest.raises(ValueError, match="num_sessions"):
        ring(num_sessions=num_sessions)
    config = ring()
    with pytest.raises(ValueError, match="num_sessions"):
        config.apply_yaml_overrides(num_sessions=num_sessions)
    assert config.num_sessions == 1


def test_a_ring_deployment_chooses_the_sessions_only() -> None:
    config = ring()
    config.apply_yaml_overrides()
    config.apply_yaml_overrides(num_sessions=3)
    assert config.num_sessions == 3
    with pytest.raises(TypeError, match="max_seq_len, page_size"):
        config.apply_yaml_overrides(page_size=8, max_seq_len=9)


def test_an_override_of_a_sharded_ring_does_not_change_the_baseline() -> None:
    config = ring()
    config.shard(2)
    config.apply_yaml_overrides(num_sessions=2)
    config.shard(4)
    assert (config.num_kv_heads, config.num_qo_heads) == (2, 2)


def test_a_spec_takes_any_collection_of_nodes_but_a_string() -> None:
    spec = KVSpec("kv", ["prefill", "decode"], paged())  # type: ignore[arg-type]
    assert spec.nodes == {"prefill", "decode"}
    with pytest.raises(ValueError, match="'decode'"):
        KVSpec("kv", "decode", paged())  # type: ignore[arg-type]


def test_a_spec_hands_overrides_to_its_config() -> None:
    spec = KVSpec("kv", {"decode"}, paged())
    spec.apply_yaml_overrides(page_size=16)
    assert spec.config.apply_yaml_overrides.__self__.page_size == 16  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="num_sessions"):
        spec.apply_yaml_overrides(num_sessions=2)
    with pytest.raises(TypeError, match="page_size"):
        KVSpec("kv", {"decode"}, ring()).apply_yaml_overrides(page_size=16)


def test_the_spec_of_each_storage_names_its_manager() -> None:
    paged_class = KVSpec("kv", {"n"}, paged()).resource_class
    ring_class = KVSpec("kv", {"n"}, ring()).resource_class
    assert (paged_class.__name__, ring_class.__name__) == ("KVManager", "RingKVManager")


def test_a_step_declares_nothing_by_default() -> None:
    step = KVStep()
    assert (step.segments, step.commit, step.combined_labels) == (None, True, {})
    assert (step.pre_forks, step.post_forks, step.fork_rids) == ((), (), None)
    assert (step.sink, step.retention) == (frozenset(), {})


def test_a_step_can_be_declared_by_position() -> None:
    policy = RetentionPolicy(32, 24)
    step = KVStep(
        (Segment("a", "main", 3),),
        False,
        {("main", "uncond"): "cfg"},
        (("main", "uncond"),),
        (("uncond", "main"),),
        frozenset({"a"}),
        frozenset({("a", "main")}),
        {("a", "main"): policy},
    )
    assert not step.commit
    assert step.retention["a", "main"].protected_prefix == 24


def test_segments_become_a_tuple_that_can_key_a_plan() -> None:
    step = KVStep([Segment("a", "main", 1)])  # type: ignore[arg-type]
    assert hash(step.segments) == hash((Segment("a", "main", 1),))


def test_ring_frames_are_keyword_only() -> None:
    assert RingKVStep(frames=(("a", 5),)).frames == (("a", 5),)
    with pytest.raises(TypeError):
        RingKVStep(None, (("a", 5),))  # type: ignore[call-arg]
