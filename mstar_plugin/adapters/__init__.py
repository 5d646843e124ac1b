"""Model adapters: the interface, the registry and the declarative base that families share."""

from mstar_plugin.adapters.groups import KVGroup, kv_groups
from mstar_plugin.adapters.interface import Adapter, HFConfig
from mstar_plugin.adapters.registry import (
    ENTRY_POINT_GROUP,
    AdapterRegistry,
    RegisteredAdapter,
    find_adapter,
    load_adapters,
    load_registry,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Adapter",
    "AdapterRegistry",
    "HFConfig",
    "KVGroup",
    "RegisteredAdapter",
    "find_adapter",
    "kv_groups",
    "load_adapters",
    "load_registry",
]
