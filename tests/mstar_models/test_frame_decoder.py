from typing import Any

import pytest

from mstar_plugin.adapters import find_adapter
from mstar_plugin.kv.config import RingKVLayerConfig
from mstar_plugin.model_kv import LayerKind, ModelKV

CONFIG: dict[str, Any] = {
    "architectures": ["FrameDecoderForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
LAYERS = [{"ring_buckets": 16}, {"ring_buckets": 4, "pinned_dilation": 8}]


def declare(**changes: Any) -> ModelKV:
    adapter = find_adapter(CONFIG["architectures"])
    assert adapter is not None
    return adapter.declare({**CONFIG, **changes})


def test_the_block_gives_each_layer_its_ring() -> None:
    model = declare(mstar={"ring": {"tokens_per_frame": 16, "layers": LAYERS}})
    assert model.ring is not None
    assert model.ring.tokens_per_frame == 16
    assert model.ring.layers == (RingKVLayerConfig(16, 16, 1), RingKVLayerConfig(4, 4, 8))
    assert (model.ring.num_qo_heads, model.ring.num_kv_heads, model.ring.head_dim) == (4, 2, 32)
    assert {layer.kind for layer in model.layers} == {LayerKind.RING}
    assert model.retention_refusal is not None


def test_without_a_block_it_is_a_llama_model() -> None:
    model = declare()
    assert model.ring is None
    assert {layer.kind for layer in model.layers} == {LayerKind.FULL}


def test_a_list_of_another_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"mstar\['ring'\]\['layers'\] .* per layer \(2\), got 3"):
        declare(mstar={"ring": {"tokens_per_frame": 16, "layers": LAYERS[:1] * 3}})
