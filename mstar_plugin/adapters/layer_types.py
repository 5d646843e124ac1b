"""Names of layer types in configs: which store KV, and what the window switches mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_plugin.adapters import refusals
from mstar_plugin.model_kv import LayerKind

if TYPE_CHECKING:
    from mstar_plugin.adapters.hf_config import ConfigReader

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

STORING = {
    FULL: LayerKind.FULL,
    "attention": LayerKind.FULL,
    SLIDING: LayerKind.SLIDING,
    CHUNKED: LayerKind.CHUNKED,
}
RECURRENT = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "lightning_attention"}
)
WITHOUT_KV = RECURRENT | {"moe", "mlp"}


def storing_kind(layer_type: str) -> LayerKind | None:
    """Kind of a layer that stores KV, None for recurrent and other layers. Raises ValueError for
    unknown names.
    """
    if layer_type in STORING:
        return STORING[layer_type]
    if layer_type in WITHOUT_KV:
        return None
    known = ", ".join(sorted(STORING.keys() | WITHOUT_KV))
    raise ValueError(f"layer_types must name known types ({known}), got {layer_type!r}")


def listed_layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types` (or `layers_block_type`) of the config, None where it has neither.

    Raises ValueError where the list is not one known name per layer.
    """
    for key in ("layer_types", "layers_block_type"):
        listed = config.sequence(key, length=num_layers)
        if listed is not None:
            for layer_type in listed:
                storing_kind(str(layer_type))
            return tuple(FULL if layer_type == "attention" else layer_type for layer_type in listed)
    return None


def window_of(config: ConfigReader, *, default_on: bool) -> int | None:
    """`sliding_window` where it is in force.

    `use_sliding_window` false, a window of 0 and a missing one mean that there is none. Raises
    ValueError where the config lists sliding layers, switches nothing off and gives no window.
    """
    if not config.flag("use_sliding_window", default=default_on):
        return None
    window = config.get("sliding_window")
    if window == 0 and not isinstance(window, bool):
        return None
    if window is None and SLIDING in (config.get("layer_types") or ()):
        raise ValueError(
            f"sliding_window must be given where layer_types lists {SLIDING}, "
            f"got none in the config of {config.architecture}"
        )
    return config.optional_count("sliding_window")


def recurrent_refusal(types: tuple[str, ...]) -> str | None:
    """Why a model with recurrent layers cannot drop tokens, or None where it has no such layer."""
    for layer_type in types:
        if layer_type in RECURRENT:
            return refusals.recurrent(layer_type)
    return None
