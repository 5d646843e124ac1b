"""Whether a server can keep its requests' protected keys at a distance that stays, and the
preparation of its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mstar_plugin.model_kv import LayerKind, ModelKV
from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm.crosscheck import layer_index
from mstar_vllm.positions import ABSOLUTE, ROLLING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig


def check_rolling(vllm_config: VllmConfig, model: ModelKV | None) -> None:
    """ValueError that names the first thing that rules rolling positions out."""
    obstacle = _obstacle(vllm_config, model)
    if obstacle is not None:
        raise ValueError(
            f"mstar cannot keep positions {ROLLING!r} with {obstacle}; use {ABSOLUTE!r}"
        )


def _obstacle(vllm_config: VllmConfig, model: ModelKV | None) -> str | None:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import is_quantized_kv_cache

    if not current_platform.is_cpu():
        return f"kernels for {current_platform.device_name}, only with those for cpu"
    if is_quantized_kv_cache(vllm_config.cache_config.cache_dtype):
        return f"a KV cache of {vllm_config.cache_config.cache_dtype}"
    if model is None:
        return "a model whose rotary settings no adapter declares"
    return _unknown_scheme(model)


def _unknown_scheme(model: ModelKV) -> str | None:
    for layer in model.layers:
        if layer.kind is LayerKind.FULL and layer.rotary is not None:
            try:
                inverse_frequencies(layer.rotary)
            except ValueError as error:
                return f"layer {layer.index}, where {error}"
    return None


def give_layers_their_turn(
    vllm_config: VllmConfig, model: ModelKV, layer_names: Iterable[str]
) -> None:
    """Let each layer that stores keys turn its copies of them."""
    from mstar_vllm.cpu_key_turn import KeyTurn

    rotary = {layer.index: layer.rotary for layer in model.layers}
    built: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layer = built[name]
        if layer.kv_sharing_target_layer_name is None:
            index = layer_index(name)
            if index is None:
                raise ValueError(
                    f"mstar cannot keep positions {ROLLING!r}: no decoder layer is named {name!r}"
                )
            layer.impl.key_turn = KeyTurn(rotary[index])
