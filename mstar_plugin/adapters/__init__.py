"""Model adapters: the interface, the registry and the declarative base that families share."""

from mstar_plugin.adapters.decoder import DecoderAdapter, HeadShape
from mstar_plugin.adapters.generic import GENERIC_ADAPTER, GenericAdapter, adapter_for
from mstar_plugin.adapters.groups import KVGroup, kv_groups
from mstar_plugin.adapters.hf_config import ConfigReader, architectures_of
from mstar_plugin.adapters.interface import Adapter, HFConfig
from mstar_plugin.adapters.latent import LatentDecoderAdapter
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
    "GENERIC_ADAPTER",
    "Adapter",
    "AdapterRegistry",
    "ConfigReader",
    "DecoderAdapter",
    "GenericAdapter",
    "HFConfig",
    "HeadShape",
    "KVGroup",
    "LatentDecoderAdapter",
    "RegisteredAdapter",
    "adapter_for",
    "architectures_of",
    "find_adapter",
    "kv_groups",
    "load_adapters",
    "load_registry",
]
