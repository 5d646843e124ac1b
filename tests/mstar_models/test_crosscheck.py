"""What an adapter declares against what the engine built: one sentence with both numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_plugin.adapters import find_adapter
from mstar_plugin.model_kv import ModelKV

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def declared(config: dict[str, Any]) -> ModelKV:
    adapter = find_adapter(config["architectures"])
    assert adapter is not None
    return adapter.declare(config)


def built(**changes: Any) -> tuple[Any, ...]:
    from mstar_vllm.crosscheck import BuiltLayer

    shape = {"num_kv_heads": 2, "num_qo_heads": 4, "head_dim": 16, "window_tokens": None}
    return tuple(BuiltLayer(index=index, **{**shape, **changes}) for index in range(2))


def check(config: dict[str, Any], layers: tuple[Any, ...], num_ranks: int = 1) -> None:
    from mstar_vllm.crosscheck import check_declaration, check_layer_count

    check_declaration(declared(config), layers, "mine", num_ranks)
    check_layer_count(declared(config), layers, "mine")


def test_layers_as_declared_pass() -> None:
    check(LLAMA, built())
    check(LLAMA, built(num_kv_heads=1, num_qo_heads=1), num_ranks=4)


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        ("num_kv_heads", 4, "declared 2 per rank, built 4"),
        ("num_qo_heads", 8, "declared 4 per rank, built 8"),
        ("head_dim", 32, "declared 16 per rank, built 32"),
        ("window_tokens", 24, "declared None per rank, built 24"),
    ],
)
def test_a_difference_is_named_with_both_numbers(field: str, value: int, numbers: str) -> None:
    with pytest.raises(
        ValueError, match=f"adapter mine must declare {field} of layer 0.*{numbers}"
    ):
        check(LLAMA, built(**{field: value}))


def test_a_layer_too_many_and_one_too_few_are_named() -> None:
    more = (*built(), replace(built()[0], index=2))
    with pytest.raises(ValueError, match="must declare layer 2"):
        check(LLAMA, more)
    with pytest.raises(ValueError, match="declared 2, built 1"):
        check(LLAMA, built()[:1])


def test_latent_layers_are_not_compared_where_the_engine_leaves_them_to_an_mla_backend() -> None:
    check(LATENT, ())


def test_latent_layers_built_as_ordinary_ones_pass_only_where_the_engine_was_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="must declare layer 0, which the engine built with"):
        check(LATENT, built())
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    check(LATENT, built())


def rotary_modules(**changes: Any) -> dict[str, Any]:
    built = {"base": 10000, "rotary_dim": 16, "is_neox_style": True, **changes}
    return {"model.layers.1.self_attn.rotary_emb": SimpleNamespace(**built)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": 500000.0}, "rotary theta of layer 1 .* declared 10000.0, built 500000.0"),
        ({"rotary_dim": 8}, "rotary rotary_dim of layer 1 .* declared 16, built 8"),
        ({"is_neox_style": False}, "rotary interleaved of layer 1 .* declared False, built True"),
    ],
)
def test_a_rotary_embedding_that_was_built_otherwise_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    from mstar_vllm.crosscheck import check_rotary

    names = [f"model.layers.{index}.self_attn.attn" for index in range(2)]
    check_rotary(declared(LLAMA), "mine", rotary_modules(), names)
    with pytest.raises(ValueError, match=f"adapter mine must declare the {told}"):
        check_rotary(declared(LLAMA), "mine", rotary_modules(**changes), names)
