"""The table by which a ring is asked for: in a model's `config.json` or in a server's settings.

    {"tokens_per_frame": 16,
     "layers": [{"ring_buckets": 16}, {"ring_buckets": 16, "pinned_dilation": 8}]}

`layers` is a list with one geometry per layer, or one geometry for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mstar_plugin.kv.config import RingKVLayerConfig

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RingDeclaration:
    """tokens_per_frame: tokens of a frame. layers: one geometry per layer, ascending."""

    tokens_per_frame: int
    layers: tuple[RingKVLayerConfig, ...]


def ring_declaration(values: Any, where: str, num_layers: int) -> RingDeclaration:
    """Check and convert a table that `where` names in errors, for a model of `num_layers` layers.

    Every unknown key, wrong value and list of another length is a ValueError.
    """
    table = _table(values, where, ("tokens_per_frame", "layers"))
    return RingDeclaration(
        tokens_per_frame=_count(table, "tokens_per_frame", where),
        layers=_layers(_required(table, "layers", where), f"{where}['layers']", num_layers),
    )


def _layers(values: Any, where: str, num_layers: int) -> tuple[RingKVLayerConfig, ...]:
    if isinstance(values, Mapping):
        return (_layer(values, where),) * num_layers
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(
            f"{where} must be a geometry or a list with one per layer, got {values!r:.40}"
        )
    if len(values) != num_layers:
        raise ValueError(
            f"{where} must have one geometry per layer ({num_layers}), got {len(values)}"
        )
    return tuple(_layer(value, f"{where}[{index}]") for index, value in enumerate(values))


def _layer(values: Any, where: str) -> RingKVLayerConfig:
    table = _table(values, where, ("ring_buckets", "pinned_dilation"))
    buckets = _count(table, "ring_buckets", where)
    dilation = _count({"pinned_dilation": 1, **table}, "pinned_dilation", where)
    return RingKVLayerConfig(ring_frames=buckets, ring_buckets=buckets, pinned_dilation=dilation)


def _table(values: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a table, got {values!r:.40}")
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(f"{where} knows {', '.join(known)}, got {', '.join(unknown):.40}")
    return values


def _required(table: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in table:
        raise ValueError(f"{where} needs {key!r}, got {sorted(table)}")
    return table[key]


def _count(table: Mapping[str, Any], key: str, where: str) -> int:
    value = _required(table, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ValueError(
            f"{where}[{key!r}] must be a whole number from 1 to {MAX_COUNT}, got {value!r:.40}"
        )
    return value
