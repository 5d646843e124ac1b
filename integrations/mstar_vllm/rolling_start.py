"""Whether a server can keep its requests' protected keys at a distance that stays, and the
preparation of its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV
from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm.crosscheck import layer_index
from mstar_vllm.positions import ABSOLUTE, ROLLING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

    from mstar_vllm.settings import Settings


SHARING = "layers that read another layer's keys on CPU"


def choose_positions(
    vllm_config: VllmConfig, settings: Settings, model: ModelKV | None
) -> tuple[str, str | None]:
    """The positions of the server's requests: those it asks for, else rolling ones where they can
    be kept; and what rules rolling ones out where they were not asked for.

    ValueError that names the first such thing where they were.
    """
    if settings.positions == ABSOLUTE:
        return ABSOLUTE, None
    obstacle = rolling_obstacle(vllm_config, settings, model)
    if obstacle is None:
        return ROLLING, None
    if settings.positions == ROLLING:
        raise ValueError(
            f"mstar cannot keep positions {ROLLING!r} with {obstacle}; use {ABSOLUTE!r}"
        )
    return ABSOLUTE, obstacle


def rolling_obstacle(
    vllm_config: VllmConfig, settings: Settings, model: ModelKV | None
) -> str | None:
    """The first thing that rules rolling positions out, or None."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import is_quantized_kv_cache

    on_cuda = not current_platform.is_cpu()
    if on_cuda and settings.kernels == "flashinfer":
        return "FlashInfer's kernels, only with FlashAttention's"
    if is_quantized_kv_cache(vllm_config.cache_config.cache_dtype):
        return f"a KV cache of {vllm_config.cache_config.cache_dtype}"
    if model is None:
        return "a model whose rotary settings no adapter declares"
    full = [layer for layer in model.layers if layer.kind is LayerKind.FULL]
    if on_cuda and any(layer.has_sinks for layer in full):
        return "attention sinks on CUDA"
    if on_cuda and any(layer.head_dim == 256 for layer in full) and _is_blackwell():
        return "FlashAttention 4's kernel for heads of 256"
    # The waves of a chunk follow one another in the layer that stores the keys.
    if not on_cuda and any(layer.shares_kv_with is not None for layer in full):
        return SHARING
    if full and not any(layer.rotary for layer in full):
        return "a model without rotary positions"
    return _unknown_scheme(full)


def _is_blackwell() -> bool:
    from vllm.platforms import current_platform

    return any(current_platform.is_device_capability_family(family) for family in (100, 110))


def _unknown_scheme(layers: Iterable[LayerKV]) -> str | None:
    for layer in layers:
        if layer.rotary is not None:
            try:
                inverse_frequencies(layer.rotary)
            except ValueError as error:
                return f"layer {layer.index}, where {error}"
    return None


def give_layers_their_turn(
    vllm_config: VllmConfig, model: ModelKV, layer_names: Iterable[str]
) -> None:
    """Tell each layer that reads the keys of `layer_names` how they are turned."""
    from vllm.platforms import current_platform

    rotary = {layer.index: layer.rotary for layer in model.layers}
    device: Any = vllm_config.device_config.device
    stores = set(layer_names)
    built: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    for name, layer in built.items():
        source = getattr(layer, "kv_sharing_target_layer_name", None) or name
        if source != name and source in stores and current_platform.is_cpu():
            raise ValueError(
                f"mstar cannot keep positions {ROLLING!r} with {SHARING}, as {name} does; use "
                f"{ABSOLUTE!r}"
            )
        if source in stores:
            layer.impl.roll(rotary[_index_of(name)], device)


def _index_of(name: str) -> int:
    index = layer_index(name)
    if index is None:
        raise ValueError(
            f"mstar cannot keep positions {ROLLING!r}: no decoder layer is named {name!r}"
        )
    return index
