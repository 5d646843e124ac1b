"""Rotary settings of one layer, from the present form of a config (`rope_parameters`) or the older
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mstar_plugin.model_kv import Rotary

if TYPE_CHECKING:
    from mstar_plugin.adapters.hf_config import ConfigReader

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
SCHEMES_WITH_ORIGIN = frozenset({"llama3", "yarn", "longrope"})
PROPORTIONAL = "proportional"
NOT_PARAMETERS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def rope_mapping(config: ConfigReader, layer_type: str) -> Mapping[str, Any]:
    """The scheme's settings for layers of `layer_type`, whichever of the three forms the config
    has.

    One mapping per layer type below `rope_parameters`, one for all of them, or the older
    `rope_scaling`.
    """
    new = config.mapping("rope_parameters")
    if not new:
        return config.mapping("rope_scaling")
    if LAYER_TYPES.isdisjoint(new):
        return new
    chosen = new.get(layer_type)
    if chosen is None:
        return {}
    if not isinstance(chosen, Mapping):
        raise ValueError(f"rope_parameters must map {layer_type} to settings, got {chosen!r}")
    return chosen


def rotary_of(
    config: ConfigReader,
    *,
    head_dim: int,
    layer_type: str = "full_attention",
    theta: float,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Rotary:
    """Rotary settings of a layer; `theta` and `fraction` stand in where the config has none.

    Example: head_dim 80 and a partial rotary factor of 0.25 -> rotary_dim 20.
    """
    settings = rope_mapping(config, layer_type)
    scaling = _scheme(settings)
    return Rotary(
        theta=_number("rope_theta", settings, config, theta),
        rotary_dim=_rotary_dim(settings, config, head_dim, fraction),
        interleaved=interleaved,
        scaling=scaling,
        parameters=_parameters(settings, config, scaling),
    )


def _scheme(settings: Mapping[str, Any]) -> str | None:
    named = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(named, str):
        raise ValueError(f"rope_type must be a name, got {named!r}")
    if named in ("default", "mrope"):
        return "mrope" if "mrope_section" in settings else None
    return "longrope" if named == "su" else named


def _number(key: str, settings: Mapping[str, Any], config: ConfigReader, default: float) -> float:
    value = settings.get(key)
    if value is None:
        value = config.number(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _rotary_dim(
    settings: Mapping[str, Any], config: ConfigReader, head_dim: int, fraction: float
) -> int:
    given = config.optional_count("rotary_dim")
    if given is not None:
        return given
    factor = _number("partial_rotary_factor", settings, config, fraction)
    if not 0.0 < factor <= 1.0:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {factor}")
    return head_dim if _scheme(settings) == PROPORTIONAL else int(head_dim * factor)


def _parameters(
    settings: Mapping[str, Any], config: ConfigReader, scaling: str | None
) -> tuple[tuple[str, object], ...]:
    found = {k: v for k, v in settings.items() if k not in NOT_PARAMETERS and v is not None}
    if scaling == PROPORTIONAL:
        found["partial_rotary_factor"] = settings.get("partial_rotary_factor", 1.0)
    if scaling in SCHEMES_WITH_ORIGIN:
        origin = config.optional_count("original_max_position_embeddings")
        found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        if origin is not None:
            found["original_max_position_embeddings"] = origin
    return tuple(sorted((key, _hashable(value)) for key, value in found.items()))


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(entry) for entry in value)
    return value
