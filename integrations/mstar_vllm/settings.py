"""The plugin's settings: read from vLLM's configuration once, into frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.positions import POSITIONS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_TOKENS = 2**31 - 1
KERNELS = ("flash_attn", "flashinfer")
_WHERE = "additional_config['mstar']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `--additional-config '{"mstar": {...}}'` says.

    `retention` is the server's policy, None where nothing is bounded, and `positions` how its
    protected keys are seen, None where that is left out. `kernels` names the parent kernels on
    CUDA, None for the default. `ring` is the ring table as given, which can be checked only beside
    a model.
    """

    retention: RetentionPolicy | None = None
    positions: str | None = None
    kernels: str | None = None
    ring: Any = None

    @classmethod
    def from_mapping(cls, values: Any) -> Settings:
        """Check and convert the `mstar` table; every unknown key or wrong value is a ValueError."""
        table = _table(values, _WHERE, ("retention", "kernels", "ring"))
        retention = table.get("retention")
        kernels = table.get("kernels")
        if kernels is not None and kernels not in KERNELS:
            raise ValueError(
                f"{_WHERE}['kernels'] must be one of {', '.join(KERNELS)}, got {kernels!r}"
            )
        return cls(
            retention=None if retention is None else _policy(retention),
            positions=None if retention is None else retention.get("positions"),
            kernels=kernels,
            ring=table.get("ring"),
        )


def settings_of(vllm_config: VllmConfig) -> Settings:
    """The settings that `vllm_config` carries; defaults where it has no `mstar` table."""
    additional = vllm_config.additional_config or {}
    if not isinstance(additional, Mapping) or "mstar" not in additional:
        return Settings()
    return Settings.from_mapping(additional["mstar"])


def token_count(name: str, value: Any, minimum: int) -> int:
    """`value` as a number of tokens of at least `minimum`; ValueError naming `name` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number of tokens, got {shown(value)}")
    if not minimum <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be between {minimum} and {MAX_TOKENS}, got {value}")
    return value


def _policy(values: Any) -> RetentionPolicy:
    where = f"{_WHERE}['retention']"
    table = _table(values, where, ("context_budget", "protected_prefix", "positions"))
    if "context_budget" not in table:
        raise ValueError(f"{where} needs 'context_budget', got {sorted(table)}")
    positions = table.get("positions")
    if positions is not None and positions not in POSITIONS:
        raise ValueError(
            f"{where}['positions'] must be one of {', '.join(POSITIONS)}, got {shown(positions)}"
        )
    return RetentionPolicy(
        context_budget=token_count(f"{where}['context_budget']", table["context_budget"], 1),
        protected_prefix=token_count(
            f"{where}['protected_prefix']", table.get("protected_prefix", 0), 0
        ),
    )


def _table(values: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a table, got {shown(values)}")
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(f"{where} knows {', '.join(known)}, got {', '.join(unknown)}")
    return values


def shown(value: Any, limit: int = 40) -> str:
    """`value` as an error names it, cut at `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
