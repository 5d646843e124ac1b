"""Finds the adapter for an architecture among the installed distributions.

Adapters are announced by entry points of the group `mstar_plugin.adapters`.

An adapter of another distribution wins over one of ours for the same architecture: whoever installs
it means it. Two other distributions that speak for the same architecture clash, and asking for that
architecture fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from mstar_plugin.adapters.interface import Adapter

ENTRY_POINT_GROUP = "mstar_plugin.adapters"
OWN_DISTRIBUTION = "mstar-plugin"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredAdapter:
    """An adapter and where it came from."""

    adapter: Adapter
    entry_point: str
    distribution: str

    @property
    def is_first_party(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.entry_point!r} of {self.distribution}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRegistry:
    """Every registered adapter, first-party ones first, then by distribution and name."""

    entries: tuple[RegisteredAdapter, ...]

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(sorted({a for entry in self.entries for a in entry.adapter.architectures}))

    def find(self, architectures: Sequence[str]) -> RegisteredAdapter | None:
        """The adapter of the first architecture anybody speaks for, or None.

        Raises ValueError where two adapters speak for it and neither yields.
        """
        for architecture in architectures:
            speakers = [e for e in self.entries if architecture in e.adapter.architectures]
            if speakers:
                return _winner(architecture, speakers)
        return None


def _winner(architecture: str, speakers: Sequence[RegisteredAdapter]) -> RegisteredAdapter:
    strongest = [e for e in speakers if not e.is_first_party] or list(speakers)
    if len(strongest) > 1:
        names = ", ".join(str(entry) for entry in strongest)
        raise ValueError(
            f"adapters for {architecture} must come from one entry point, got {names}: "
            "uninstall all but one"
        )
    return strongest[0]


def load_registry(found: Iterable[EntryPoint]) -> AdapterRegistry:
    """Registry of the given entry points.

    Raises ImportError or TypeError that names the entry point at fault.
    """
    entries = [_load(point) for point in found]
    entries.sort(key=lambda e: (not e.is_first_party, e.distribution, e.entry_point))
    return AdapterRegistry(entries=tuple(entries))


def _load(point: EntryPoint) -> RegisteredAdapter:
    distribution = point.dist.name if point.dist is not None else "an unknown distribution"
    try:
        adapter = point.load()
    except Exception as error:
        raise ImportError(
            f"adapter {point.name!r} of {distribution} must be importable, got {error!r} "
            f"from {point.value}: repair or uninstall {distribution}"
        ) from error
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"adapter {point.name!r} of {distribution} must be an mstar_plugin.adapters.Adapter, "
            f"got {adapter!r} from {point.value}"
        )
    return RegisteredAdapter(adapter=adapter, entry_point=point.name, distribution=distribution)


@cache
def load_adapters() -> AdapterRegistry:
    """Registry of everything installed; read once per process."""
    return load_registry(entry_points(group=ENTRY_POINT_GROUP))


def find_adapter(architectures: Sequence[str]) -> Adapter | None:
    """The installed adapter that speaks for one of `architectures` (as in `config.json`)."""
    entry = load_adapters().find(architectures)
    return None if entry is None else entry.adapter
