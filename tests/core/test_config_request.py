"""What a request declares: labels, publishing, layouts, and the checks before it is accepted."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.config import (
    KVReqConfig,
    KVSpec,
    PagedKVConfig,
    PrefixSpan,
    RetentionPolicy,
    RingKVConfig,
    RingKVLayerConfig,
    StreamLayout,
    refuse_undeclared_labels,
    without_layouts,
)
from mstar_plugin.spec import ResourceReqConfig

DECODE = (("decode", 1),)


def spec(max_seq_len: int, max_num_pages: int = 2048, page_size: int = 128) -> KVSpec:
    config = PagedKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        max_seq_len=max_seq_len,
        max_num_pages=max_num_pages,
        page_size=page_size,
    )
    return KVSpec("kv", {"node"}, config)


def ring_spec() -> KVSpec:
    layers = (RingKVLayerConfig(2, 2, 1),)
    config = RingKVConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, tokens_per_frame=128, layers=layers
    )
    return KVSpec("kv", {"node"}, config)


def stream(
    base: int, growth: tuple[tuple[str, int], ...] = DECODE, retained: bool = False
) -> StreamLayout:
    policy = RetentionPolicy(8) if retained else None
    return StreamLayout((PrefixSpan(base, base, "text"),), growth, retention=policy)


def test_labels_come_from_the_narrowest_map_that_answers() -> None:
    config = KVReqConfig(["d"], {"n": ["node"]}, {("n", "w"): ["walk"]})
    assert config.get_labels("n", "w") == ["walk"]
    assert config.get_labels("n", "other") == ["node"]
    assert config.get_labels("unknown", "w") == ["d"]
    assert KVReqConfig().get_labels("n", "w") == ["main"]
    assert KVReqConfig(needed_labels_per_node_walk={("n", "w"): []}).get_labels("n", "w") == []


def test_opened_labels_are_those_of_every_map() -> None:
    config = KVReqConfig(["a"], {"n": ["b"]}, {("n", "w"): ["c", "a"]})
    assert config.opened_labels() == {"a", "b", "c"}
    assert KVReqConfig().opened_labels() == KVReqConfig([]).opened_labels() == {"main"}
    assert KVReqConfig(None, {"n": ["b"]}).opened_labels() == {"main", "b"}


def test_without_a_map_every_step_publishes_all_and_the_stop_nothing() -> None:
    config = KVReqConfig()
    assert config.get_publish_labels("n", "w", ["a", "b"]) == ["a", "b"]
    assert config.get_publish_labels(None, None, ["a", "b"]) == ["a", "b"]
    assert config.get_publish_labels("n", "w", ["a", "b"], final=True) == []


def test_a_prefill_publishes_for_the_decode_worker() -> None:
    everything = ["main", "cfg_text", "cfg_img"]
    config = KVReqConfig(
        publish_labels_per_node_walk={("llm", "prefill"): everything},
        final_publish_labels_per_node_walk={("llm", "decode"): ["main", "cfg_img"]},
    )
    assert config.get_publish_labels("llm", "prefill", everything) == everything
    assert config.get_publish_labels("llm", "decode", everything) == []
    assert config.get_publish_labels("llm", "decode", everything, final=True) == ["main", "cfg_img"]
    assert config.get_publish_labels("llm", "prefill", everything, final=True) == []


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize(("node", "walk"), [(None, "w"), ("n", None), (None, None)])
def test_a_map_answers_nothing_without_node_and_walk(
    node: str | None, walk: str | None, final: bool
) -> None:
    labels = {("n", "w"): ["a"]}
    config = KVReqConfig(
        publish_labels_per_node_walk=labels, final_publish_labels_per_node_walk=labels
    )
    assert config.get_publish_labels(node, walk, ["a"], final=final) == []


def test_conductor_values_overwrite_only_what_is_given() -> None:
    config = KVReqConfig(prefix_tail={"main": [7]}, loop_caps={"decode": 3})
    config.apply_conductor_config(
        prefix_keys={"main": [b"k"]}, prefix_decode={"main": "ids"}, prefix_cache=False, seed=5
    )
    assert config.prefix_keys == {"main": [b"k"]}
    assert config.prefix_decode == {"main": "ids"}
    assert not config.prefix_cache
    assert (config.prefix_tail, config.loop_caps) == ({"main": [7]}, {"decode": 3})


def test_layouts_arrive_as_plain_rows() -> None:
    config = KVReqConfig()
    rows = {"main": [[[300, 300, "text"]], [["decode", 1]], 0, None, 1]}
    sent = pickle.loads(pickle.dumps(rows))
    config.apply_conductor_config(kv_layout=sent, loop_caps={"decode": 9})
    assert config.kv_layout is not None
    assert config.kv_layout["main"].positions({"decode": 9}) == 309
    assert config.loop_caps == {"decode": 9}


@pytest.mark.parametrize("row", [[[[1]]], [[], [], 0, None, 1], [[], [], 0, None, 0, 0]])
def test_an_unreadable_layout_names_its_label(row: list[object]) -> None:
    with pytest.raises(ValueError, match="'uncond'"):
        KVReqConfig().apply_conductor_config(kv_layout={"uncond": row})


PROMPT = StreamLayout(
    (PrefixSpan(300, 300, "t"), PrefixSpan(1024, 1, "i"), PrefixSpan(20, 20, "t")), DECODE
)


def test_positions_up_to_the_bound_are_accepted() -> None:
    config = KVReqConfig(kv_layout={"main": PROMPT}, loop_caps={"decode": 500})
    config.validate(spec(821))
    with pytest.raises(ValueError, match=r"'main' .*max_seq_len=820 .*821"):
        config.validate(spec(820))


def test_nothing_bounds_a_ring_a_window_or_a_request_without_layouts() -> None:
    config = KVReqConfig(kv_layout={"main": stream(50)}, loop_caps={"decode": 500})
    for unbounded in (None, ring_spec()):
        config.validate(unbounded)
        assert config.loop_room(unbounded) == {}
    KVReqConfig().validate(spec(8))
    assert KVReqConfig().loop_room(spec(8)) == {}
    window = KVReqConfig(kv_layout={"main": stream(50, retained=True)}, loop_caps={"decode": 500})
    window.validate(spec(8))
    assert window.loop_room(spec(8)) == {}


def test_a_cap_of_an_unknown_loop_is_no_error() -> None:
    KVReqConfig(kv_layout={"main": stream(8)}, loop_caps={"other": 500}).validate(spec(8))


def test_every_laid_out_label_is_checked() -> None:
    config = KVReqConfig(kv_layout={"main": stream(8), "uncond": stream(9)})
    with pytest.raises(ValueError, match="'uncond'"):
        config.validate(spec(8))


def test_room_is_what_the_longest_label_leaves() -> None:
    two = {"main": stream(321), "uncond": stream(100, (("decode", 2),))}
    assert KVReqConfig(kv_layout={"main": stream(321)}).loop_room(spec(1024)) == {"decode": 703}
    assert KVReqConfig(kv_layout=two).loop_room(spec(1024)) == {"decode": 462}


def test_a_retained_label_does_not_narrow_the_room() -> None:
    layouts = {"main": stream(321), "roll": stream(1000, retained=True)}
    assert KVReqConfig(kv_layout=layouts).loop_room(spec(1024)) == {"decode": 703}


def test_other_loops_count_at_their_caps() -> None:
    layout = stream(100, (("think", 1), ("draw", 10), ("idle", 0)))
    config = KVReqConfig(kv_layout={"main": layout}, loop_caps={"draw": 5})
    assert config.loop_room(spec(1000)) == {"think": 850, "draw": 90}


def test_the_pool_bounds_a_request_that_no_eviction_could_help() -> None:
    config = KVReqConfig(kv_layout={"main": stream(20)})
    assert config.loop_room(spec(1024, max_num_pages=9, page_size=8)) == {"decode": 44}


def test_a_request_that_is_too_long_already_has_no_room() -> None:
    assert KVReqConfig(kv_layout={"main": stream(50)}).loop_room(spec(49)) == {"decode": 0}


@given(
    base=st.integers(0, 200),
    growth=st.integers(1, 5),
    scratch=st.integers(0, 40),
    max_seq_len=st.integers(1, 300),
    max_num_pages=st.integers(2, 40),
    page_size=st.integers(1, 16),
)
def test_room_is_the_largest_count_that_fits(
    base: int, growth: int, scratch: int, max_seq_len: int, max_num_pages: int, page_size: int
) -> None:
    layout = StreamLayout((PrefixSpan(base, base, "t"),), (("decode", growth),), scratch)
    bounds = spec(max_seq_len, max_num_pages, page_size)
    room = KVReqConfig(kv_layout={"main": layout}).loop_room(bounds)["decode"]

    def fits(iterations: int) -> bool:
        caps = {"decode": iterations}
        within = layout.pages(caps, page_size) <= max_num_pages - 1
        return within and layout.positions(caps) <= max_seq_len

    assert fits(room) or (room == 0 and not fits(0))
    assert not fits(room + 1)


def test_declared_labels_pass() -> None:
    configs: dict[str, ResourceReqConfig] = {
        "kv": KVReqConfig(["main", "uncond"]),
        "sampler": ResourceReqConfig(),
    }
    declared = {"kv": ("main", "uncond", "spare")}
    refuse_undeclared_labels("m", declared, {"kv": {"main": StreamLayout()}}, configs)


def test_a_model_that_lays_nothing_out_opens_what_it_likes() -> None:
    refuse_undeclared_labels("m", {}, {}, {"kv": KVReqConfig(["anything"])})


def test_an_undeclared_layout_is_the_models_fault() -> None:
    layouts = {"kv": {"z": StreamLayout(), "main": StreamLayout(), "b": StreamLayout()}}
    with pytest.raises(RuntimeError, match=r"'qwen' .*\['b', 'z'\].*'kv'.*\['main'\]"):
        refuse_undeclared_labels("qwen", {"kv": ("main",)}, layouts, {})
    with pytest.raises(RuntimeError, match="'vision'"):
        refuse_undeclared_labels("qwen", {"kv": ("main",)}, {"vision": {}}, {})


def test_an_undeclared_opened_label_is_the_models_fault() -> None:
    configs = {"kv": KVReqConfig(None, {"n": ["cfg"]})}
    with pytest.raises(RuntimeError, match=r"opens labels \['cfg'\]"):
        refuse_undeclared_labels("qwen", {"kv": ("main",)}, {}, configs)
    with pytest.raises(RuntimeError, match=r"opens labels \['cfg', 'main'\] of KV resource 'kv'"):
        refuse_undeclared_labels("qwen", {"other": ("main",)}, {}, configs)


def test_configs_travel_without_their_layouts() -> None:
    with_layout = KVReqConfig(["a"], kv_layout={"a": stream(3)}, loop_caps={"decode": 1})
    with_caps = KVReqConfig(loop_caps={})
    bare, other = KVReqConfig(["b"]), ResourceReqConfig()
    configs = {"one": with_layout, "two": with_caps, "three": bare, "four": other}
    before = copy.deepcopy(with_layout)
    sent = without_layouts(configs)
    assert list(sent) == list(configs)
    assert sent["one"] == KVReqConfig(["a"])
    assert sent["two"] == KVReqConfig()
    assert sent["three"] is bare and sent["four"] is other
    assert with_layout == before and with_caps.loop_caps == {}


def test_a_resource_without_options_declares_nothing() -> None:
    config = ResourceReqConfig()
    config.apply_conductor_config(seed=3)
    config.validate()
    assert config.loop_room() == {}
