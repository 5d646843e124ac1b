"""Names of layer types in configs: which store KV, and what the window switches mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_plugin.model_kv import LayerKind

if TYPE_CHECKING:
    from mstar_plugin.adapters.hf_config import ConfigReader

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

LISTS = ("layer_types", "layers_block_type")
PRESENT_NAMES = {"attention": FULL, "mamba": "linear_attention"}

STORING = {
    FULL: LayerKind.FULL,
    SLIDING: LayerKind.SLIDING,
    CHUNKED: LayerKind.CHUNKED,
    "hybrid": LayerKind.FULL,
    "hybrid_sliding": LayerKind.SLIDING,
}
RECURRENT = frozenset({"linear_attention", "conv", "recurrent", "hybrid", "hybrid_sliding"})
WITHOUT_KV = (RECURRENT | {"moe", "mlp"}) - STORING.keys()


def storing_kind(layer_type: str) -> LayerKind | None:
    """Kind of a layer that stores KV, None for others. Raises ValueError for unknown names."""
    if layer_type in STORING:
        return STORING[layer_type]
    if layer_type in WITHOUT_KV:
        return None
    known = ", ".join(sorted(STORING.keys() | WITHOUT_KV))
    raise ValueError(f"layer_types must name known types ({known}), got {layer_type!r}")


def count_layers(config: ConfigReader) -> int:
    """`num_hidden_layers`, or the length of the list of layer types in files that leave it out."""
    if config.get("num_hidden_layers") is None:
        for key in LISTS:
            if isinstance(config.get(key), list | tuple):
                return len(config.get(key))
    return config.count("num_hidden_layers")


def listed_layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    """The config's list of layer types under its present names, None where it has none.

    Raises ValueError where the list is not one known name per layer.
    """
    for key in LISTS:
        listed = config.sequence(key, length=num_layers)
        if listed is not None:
            names = tuple(PRESENT_NAMES.get(str(name), str(name)) for name in listed)
            for name in names:
                storing_kind(name)
            return names
    return None


def window_of(config: ConfigReader, *, default_on: bool) -> int | None:
    """`sliding_window` where it is in force.

    `use_sliding_window` false, a window of 0 or null and a missing one mean that there is none.
    Raises ValueError where the config lists sliding layers and does not speak of a window.
    """
    if not config.flag("use_sliding_window", default=default_on):
        return None
    window = config.get("sliding_window")
    if window == 0 and not isinstance(window, bool):
        return None
    if not config.has("sliding_window") and SLIDING in (config.get("layer_types") or ()):
        raise ValueError(
            f"sliding_window must be given where layer_types lists {SLIDING}, "
            f"got none in the config of {config.architecture}"
        )
    return config.optional_count("sliding_window")


def has_recurrent_layers(types: tuple[str, ...]) -> bool:
    """Whether some layer keeps a state instead of, or beside, its KV."""
    return not RECURRENT.isdisjoint(types)
