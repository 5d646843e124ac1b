"""The adapter for architectures nobody speaks for: reads common keys, claims nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_plugin.adapters import refusals
from mstar_plugin.adapters.decoder import DecoderAdapter
from mstar_plugin.adapters.hf_config import ConfigReader
from mstar_plugin.adapters.latent import LatentDecoderAdapter
from mstar_plugin.adapters.registry import find_adapter

if TYPE_CHECKING:
    from mstar_plugin.adapters.interface import Adapter, HFConfig
    from mstar_plugin.model_kv import ModelKV, Rotary

ROTARY_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_emb_base")


@dataclass(frozen=True, kw_only=True)
class GenericAdapter(DecoderAdapter):
    """Reads the common keys of any decoder and refuses retention where they do not show it to be
    right.
    """

    def declare(self, hf_config: HFConfig) -> ModelKV:
        if ConfigReader.of(hf_config).get("kv_lora_rank") is not None:
            return _LATENT.declare(hf_config)
        return super().declare(hf_config)

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        if not states_rotary(config):
            return None
        return super().rotary(config, types, index, head_dim)

    def retention_refusal(self, config: ConfigReader, types: tuple[str, ...]) -> str | None:
        if config.flag("is_encoder_decoder", default=False):
            return refusals.CROSS_ATTENTION
        if states_alibi(config):
            return refusals.ALIBI
        if not states_rotary(config):
            return refusals.UNKNOWN_POSITIONS
        return super().retention_refusal(config, types)


def states_rotary(config: ConfigReader) -> bool:
    """Whether the config has settings of rotary positions."""
    return any(config.get(key) for key in ROTARY_KEYS)


def states_alibi(config: ConfigReader) -> bool:
    """Whether the config asks for ALiBi, at top level or in `attn_config`."""
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        return True
    return bool(config.mapping("attn_config").get("alibi"))


_LATENT = LatentDecoderAdapter(name="generic", architectures=())

GENERIC_ADAPTER = GenericAdapter(name="generic", architectures=())


def adapter_for(architectures: Sequence[str]) -> Adapter:
    """The installed adapter that speaks for one of `architectures`, else `GENERIC_ADAPTER`."""
    return find_adapter(architectures) or GENERIC_ADAPTER
