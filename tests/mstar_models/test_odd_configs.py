"""Configurations with switches, lists and gaps: each read right, or refused by the key's name."""

from typing import Any

import pytest

from mstar_plugin.adapters import adapter_for
from mstar_plugin.model_kv import LayerKind, ModelKV

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def declared(architecture: str, **changes: Any) -> ModelKV:
    config = {"architectures": [architecture], **BASE, **changes}
    config = {key: value for key, value in config.items() if value != "absent"}
    return adapter_for([architecture]).declare(config)


def windows(model: ModelKV) -> list[int | None]:
    return [layer.window_tokens for layer in model.layers]


QWENS = ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@pytest.mark.parametrize("architecture", QWENS)
def test_switched_off_window_leaves_full_layers(architecture: str) -> None:
    model = declared(
        architecture, use_sliding_window=False, sliding_window=128, max_window_layers=2
    )
    assert windows(model) == [None] * 6


@pytest.mark.parametrize("architecture", QWENS)
def test_missing_switch_means_no_window(architecture: str) -> None:
    assert windows(declared(architecture, sliding_window=128)) == [None] * 6


@pytest.mark.parametrize(
    ("first_sliding", "expected"),
    [
        (6, [None] * 6),
        (4, [None] * 4 + [128] * 2),
        (0, [128] * 6),
        (28, [None] * 6),
    ],
)
def test_layers_from_max_window_layers_on_slide(
    first_sliding: int, expected: list[int | None]
) -> None:
    model = declared(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=128,
        max_window_layers=first_sliding,
    )
    assert windows(model) == expected


def test_layer_types_win_over_max_window_layers() -> None:
    model = declared(
        "Qwen3ForCausalLM",
        use_sliding_window=True,
        sliding_window=128,
        max_window_layers=0,
        layer_types=[FULL, SLIDING] * 3,
    )
    assert windows(model) == [None, 128] * 3


def test_window_of_zero_is_none() -> None:
    assert windows(declared("MistralForCausalLM", sliding_window=0)) == [None] * 6


def test_window_that_is_null_is_none_and_a_missing_one_is_the_families() -> None:
    assert windows(declared("MistralForCausalLM", sliding_window=None)) == [None] * 6
    assert windows(declared("MistralForCausalLM")) == [4096] * 6


def test_window_without_layer_types_covers_every_layer() -> None:
    assert windows(declared("MistralForCausalLM", sliding_window=256)) == [256] * 6


def test_command_windows_count_the_query_besides() -> None:
    model = declared("Cohere2ForCausalLM", sliding_window=256)
    assert windows(model) == [257, 257, 257, None, 257, 257]


def test_gemma_2_alternates_without_layer_types() -> None:
    assert windows(declared("Gemma2ForCausalLM", sliding_window=64)) == [64, None] * 3


def test_gemma_3_pattern_can_be_given_as_a_number() -> None:
    model = declared("Gemma3ForCausalLM", sliding_window=64, sliding_window_pattern=2)
    assert windows(model) == [64, None] * 3


def test_bidirectional_gemma_3_halves_its_window() -> None:
    model = declared("Gemma3ForCausalLM", sliding_window=64, use_bidirectional_attention=True)
    assert windows(model)[0] == 33


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_layer_types_of_another_length_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=r"^layer_types must have one entry per layer \(6\)"):
        declared("Qwen3ForCausalLM", layer_types=[FULL] * count)


def test_unknown_layer_type_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="^layer_types must name known types .*'dreaming'"):
        declared("Qwen3ForCausalLM", layer_types=["dreaming"] * 6)


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="^sliding_window must be given"):
        declared("SomeForCausalLM", layer_types=[FULL, SLIDING] * 3)


def test_a_window_that_is_null_leaves_listed_sliding_layers_full() -> None:
    model = declared("SomeForCausalLM", layer_types=[FULL, SLIDING] * 3, sliding_window=None)
    assert windows(model) == [None] * 6
    assert {layer.kind for layer in model.layers} == {LayerKind.FULL}


@pytest.mark.parametrize("window", ["512", -1, 1.5, True, [512]])
def test_wrong_window_is_refused(window: object) -> None:
    with pytest.raises(ValueError, match="^sliding_window must be a positive integer"):
        declared("MistralForCausalLM", sliding_window=window)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be in the config of LlamaForCausalLM"):
        declared("LlamaForCausalLM", **{key: "absent"})


def test_missing_kv_heads_mean_one_per_query_head() -> None:
    model = declared("LlamaForCausalLM", num_key_value_heads="absent")
    assert {layer.num_kv_heads for layer in model.layers} == {4}


def test_missing_positions_bound_nothing() -> None:
    assert declared("LlamaForCausalLM", max_position_embeddings="absent").max_positions is None


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_key_value_heads must divide .* got 3 in layer 0"):
        declared("LlamaForCausalLM", num_key_value_heads=3)


def test_hidden_size_that_does_not_divide_needs_head_dim() -> None:
    with pytest.raises(ValueError, match="^hidden_size must be a multiple of num_attention_heads"):
        declared("LlamaForCausalLM", hidden_size=66)
    assert declared("LlamaForCausalLM", hidden_size=66, head_dim=16).layers[0].head_dim == 16


@pytest.mark.parametrize("head_dim", [None, 0])
def test_empty_head_dim_is_a_share_of_hidden_size(head_dim: int | None) -> None:
    assert declared("LlamaForCausalLM", head_dim=head_dim).layers[0].head_dim == 16


def test_heads_can_differ_by_layer() -> None:
    model = declared(
        "SomeForCausalLM",
        num_attention_heads=[4, 4, 8, 8, 16, 16],
        num_key_value_heads=[2, 2, 2, 4, 4, 4],
        head_dim=16,
    )
    heads = [(layer.num_kv_heads, layer.num_qo_heads) for layer in model.layers]
    assert heads == [(2, 4), (2, 4), (2, 8), (4, 8), (4, 16), (4, 16)]


@pytest.mark.parametrize("key", [1, "1", "01"])
def test_values_given_for_one_layer_change_that_layer(key: object) -> None:
    model = declared(
        "LlamaForCausalLM", per_layer_config={key: {"num_key_value_heads": 1, "head_dim": 32}}
    )
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in model.layers]
    assert shapes == [(2, 16), (1, 32), (2, 16), (2, 16), (2, 16), (2, 16)]


@pytest.mark.parametrize("wrong", [[1], {"first": {}}, {0: 3}])
def test_wrong_values_for_layers_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="^per_layer_config must"):
        declared("LlamaForCausalLM", per_layer_config=wrong)


def test_head_list_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_key_value_heads must have one entry per layer"):
        declared("SomeForCausalLM", num_key_value_heads=[2, 2])


@pytest.mark.parametrize("nest", ["text_config", "llm_config", "language_config"])
def test_text_model_is_found_below_other_keys(nest: str) -> None:
    config = {
        "architectures": ["SomeVisionModel"],
        nest: BASE,
        "num_hidden_layers": 99,
        "vision_config": {"num_hidden_layers": 50},
    }
    model = adapter_for(["SomeVisionModel"]).declare(config)
    assert model.architecture == "SomeVisionModel"
    assert len(model.layers) == 6


def test_text_model_is_found_two_levels_down() -> None:
    config = {"architectures": ["Omni"], "thinker_config": {"text_config": BASE}}
    assert len(adapter_for(["Omni"]).declare(config).layers) == 6


def test_nested_text_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="^text_config must be a mapping, got 'llama'"):
        adapter_for(["Odd"]).declare({"architectures": ["Odd"], "text_config": "llama"})


@pytest.mark.parametrize("shared", [6, 7])
def test_sharing_layers_need_a_layer_to_share_with(shared: int) -> None:
    with pytest.raises(ValueError, match="^num_kv_shared_layers must leave"):
        declared("Gemma3nForCausalLM", sliding_window=64, num_kv_shared_layers=shared)


def test_sharing_never_crosses_window_kinds() -> None:
    model = declared(
        "Gemma3nForCausalLM",
        sliding_window=64,
        num_kv_shared_layers=2,
        layer_types=[FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
    )
    assert [layer.shares_kv_with for layer in model.layers] == [None] * 4 + [3, 2]


def test_sharing_without_a_layer_of_the_same_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="^num_kv_shared_layers must leave a full_attention"):
        declared(
            "Gemma3nForCausalLM",
            sliding_window=64,
            num_kv_shared_layers=2,
            layer_types=[SLIDING] * 4 + [SLIDING, FULL],
        )


def test_llama_4_list_of_zeros_and_ones_wins_over_the_interval() -> None:
    model = declared(
        "Llama4ForCausalLM", no_rope_layers=[1, 0, 1, 0, 1, 0], attention_chunk_size=512
    )
    assert [layer.kind for layer in model.layers] == [LayerKind.CHUNKED, LayerKind.FULL] * 3
    assert [layer.rotary is None for layer in model.layers] == [False, True] * 3


def test_llama_4_without_chunks_is_full_throughout() -> None:
    model = declared("Llama4ForCausalLM", attention_chunk_size=None)
    assert {layer.kind for layer in model.layers} == {LayerKind.FULL}
    assert model.layers[3].rotary is None


def test_old_and_new_rotary_keys_agree() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    old = declared("LlamaForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    new = declared(
        "LlamaForCausalLM", rope_theta="absent", rope_parameters={**scaling, "rope_theta": 5e5}
    )
    assert old == new


def test_long_rope_carries_the_length_it_was_trained_for() -> None:
    model = declared(
        "Phi3ForCausalLM",
        original_max_position_embeddings=256,
        rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    )
    rotary = model.layers[0].rotary
    assert rotary is not None
    assert rotary.scaling == "longrope"
    assert dict(rotary.parameters)["original_max_position_embeddings"] == 256
    assert dict(rotary.parameters)["long_factor"] == (2.0,) * 8


def test_odd_partial_rotary_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="^rotary_dim must be even and positive, got 3"):
        declared("LlamaForCausalLM", partial_rotary_factor=0.2)


@pytest.mark.parametrize("factor", [0, 1.5, -0.5, "half"])
def test_wrong_partial_rotary_factor_is_refused(factor: object) -> None:
    with pytest.raises(ValueError, match="^partial_rotary_factor must be"):
        declared("LlamaForCausalLM", partial_rotary_factor=factor)


def test_falcon_counts_kv_heads_by_its_switches() -> None:
    def kv_heads(**changes: Any) -> int:
        return declared("FalconForCausalLM", **changes).layers[0].num_kv_heads

    assert kv_heads() == 1
    assert kv_heads(multi_query=False) == 4
    assert kv_heads(new_decoder_architecture=True) == 2


def test_granite_with_layer_types_has_sinks_unless_it_says_no() -> None:
    types = [SLIDING, FULL] * 3
    with_sinks = declared("GraniteForCausalLM", layer_types=types, sliding_window=64)
    without = declared(
        "GraniteForCausalLM", layer_types=types, sliding_window=64, attention_sinks=False
    )
    assert {layer.has_sinks for layer in with_sinks.layers} == {True}
    assert {layer.has_sinks for layer in without.layers} == {False}


def test_granite_layers_can_have_rotary_bases_of_their_own() -> None:
    model = declared("GraniteForCausalLM", layer_rope_theta=[1e4, 0, 5e5, 0, 1e4, 0])
    bases = [layer.rotary and layer.rotary.theta for layer in model.layers]
    assert bases == [1e4, None, 5e5, None, 1e4, None]


@pytest.mark.parametrize(
    "pattern", ["M*M-M", "M*M-M*M", "M*M-Mx", 5], ids=["short", "long", "letter", "number"]
)
def test_wrong_hybrid_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(ValueError, match="^hybrid_override_pattern must"):
        declared("NemotronHForCausalLM", hybrid_override_pattern=pattern)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"alibi": True}, "ALiBi"),
        ({"attn_config": {"alibi": True}}, "ALiBi"),
        ({"position_embedding_type": "alibi"}, "ALiBi"),
        ({"rope_theta": "absent"}, "positions that its config"),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, "MLA"),
        ({"layer_types": ["mamba", "attention"] * 3}, "recurrent"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual chunk"),
    ],
)
def test_generic_adapter_refuses_retention_where_it_cannot_be_right(
    changes: dict[str, Any], word: str
) -> None:
    refusal = declared("SomeForCausalLM", **changes).retention_refusal
    assert refusal is not None
    assert word in refusal


def test_generic_adapter_allows_retention_on_a_rotary_decoder() -> None:
    model = declared("SomeForCausalLM")
    assert model.retention_refusal is None
    assert adapter_for(["SomeForCausalLM"]).name == "generic"


def test_latent_layers_store_ranks_and_no_heads() -> None:
    model = declared("SomeForCausalLM", kv_lora_rank=32, qk_rope_head_dim=8)
    assert {layer.kind for layer in model.layers} == {LayerKind.MLA}
    assert model.elements_per_token == 6 * 40


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "OPTForCausalLM", "GPTNeoXForCausalLM"]
)
def test_a_stray_number_of_kv_heads_is_ignored_where_heads_are_never_grouped(
    architecture: str,
) -> None:
    assert {layer.num_kv_heads for layer in declared(architecture).layers} == {4}
