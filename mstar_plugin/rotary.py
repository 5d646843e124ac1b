"""Rotary frequencies of the schemes that are a pure turn by distance.

A key stored at position `j` holds `R(j) k`, and `R(a) R(b) = R(a + b)`: turned by `d` it is the key
of position `j + d`, whatever constant the scheme multiplies it by. Schemes whose frequencies depend
on the length of the text have no such turn and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar_plugin.model_kv import Rotary

Frequencies = npt.NDArray[np.float64]


def inverse_frequencies(rotary: Rotary) -> Frequencies:
    """Radians per token of each pair, `[rotary_dim / 2]` float64, first pair first.

    Pair `i` turns by `theta ** (-2 i / rotary_dim)` (Su et al., "RoFormer", 2021), changed by the
    scheme. ValueError naming the scheme where it is not one of `SCHEMES`.
    Example: theta 10,000 and rotary_dim 4 -> [1, 0.01].
    """
    scheme = rotary.scaling
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(
            f"the rotary scheme must be plain or one of {', '.join(SCHEMES)}, got {scheme!r}"
        )
    exponents = np.arange(0, rotary.rotary_dim, 2) / rotary.rotary_dim
    plain: Frequencies = rotary.theta**-exponents
    if scheme is None:
        return plain
    return SCHEMES[scheme](rotary, plain, dict(rotary.parameters))


def _linear(rotary: Rotary, plain: Frequencies, settings: Mapping[str, Any]) -> Frequencies:
    """Chen et al., "Extending context window via position interpolation", 2023."""
    return plain / float(settings["factor"])


def _llama3(rotary: Rotary, plain: Frequencies, settings: Mapping[str, Any]) -> Frequencies:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    factor = float(settings["factor"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    turns = int(settings["original_max_position_embeddings"]) * plain / (2 * math.pi)
    width = max(high - low, 1e-9)
    kept: Frequencies = np.clip((turns - low) / width, 0, 1)
    return plain * kept + plain / factor * (1 - kept)


def _yarn(rotary: Rotary, plain: Frequencies, settings: Mapping[str, Any]) -> Frequencies:
    """Peng et al., "YaRN", 2023: interpolated below `beta_slow` turns, kept above `beta_fast`."""
    factor = float(settings["factor"])
    origin = int(settings["original_max_position_embeddings"])
    low = _dimension_of(float(settings.get("beta_fast", 32)), rotary, origin)
    high = _dimension_of(float(settings.get("beta_slow", 1)), rotary, origin)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(rotary.rotary_dim // 2) - low) / (high - low)
    kept: Frequencies = 1 - np.clip(ramp, 0, 1)
    return plain * kept + plain / factor * (1 - kept)


def _dimension_of(turns: float, rotary: Rotary, origin: int) -> float:
    """The pair that makes `turns` turns over `origin` tokens."""
    wavelength = origin / (turns * 2 * math.pi)
    return rotary.rotary_dim * math.log(wavelength) / (2 * math.log(rotary.theta))


SCHEMES: Mapping[str, Callable[[Rotary, Frequencies, Mapping[str, Any]], Frequencies]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
