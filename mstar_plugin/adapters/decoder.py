"""The declarative base of adapters: reads the common keys of a decoder's config.

A family is an instance of `DecoderAdapter` that sets a few fields, or a subclass that overrides the
one method in which it differs. Layer types are named as in `config.json` ("full_attention",
"sliding_attention", ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mstar_plugin.adapters import refusals
from mstar_plugin.adapters.hf_config import ConfigReader
from mstar_plugin.adapters.interface import Adapter, HFConfig
from mstar_plugin.adapters.layer_types import (
    FULL,
    SLIDING,
    count_layers,
    has_recurrent_layers,
    listed_layer_types,
    storing_kind,
    window_of,
)
from mstar_plugin.adapters.rotary import rotary_of
from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV, Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """Heads of one layer of the whole model; `head_dim` in elements."""

    num_kv_heads: int
    num_qo_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class DecoderAdapter(Adapter):
    """Adapter for decoders with the common keys.

    defaults: values for keys that published files of the family leave out. theta, rotary_fraction:
    rotary base and turned share of a head where the config has none. interleaved: neighbouring
    elements form the rotary pairs. window_default_on: what a missing `use_sliding_window` means.
    window_beside_query: `sliding_window` does not count the query itself. has_sinks: heads carry a
    learned sink logit. refusal: what rules out retention. retention: the policy in force where
    the operator gives none and nothing refuses it.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    theta: float = 10_000.0
    rotary_fraction: float = 1.0
    interleaved: bool = False
    window_default_on: bool = True
    window_beside_query: bool = False
    has_sinks: bool = False
    refusal: str | None = None
    retention: RetentionPolicy | None = None

    def declare(self, hf_config: HFConfig) -> ModelKV:
        config = ConfigReader.of(hf_config, defaults=self.defaults)
        types = self.layer_types(config, self.count_layers(config))
        refusal = self.retention_refusal(config, types)
        return ModelKV(
            architecture=config.architecture,
            layers=tuple(
                self.layer(config.for_layer(index), types, index)
                for index, layer_type in enumerate(types)
                if storing_kind(layer_type) is not None
            ),
            max_positions=config.optional_count("max_position_embeddings"),
            retention=None if refusal is not None else self.retention,
            retention_refusal=refusal,
        )

    def count_layers(self, config: ConfigReader) -> int:
        """Layers of the decoder, those without KV included."""
        return count_layers(config)

    def layer_types(self, config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        """Type of every layer: `layer_types` where the config lists them, else the family's own
        rule.

        A sliding layer whose window the config switches off is a full one.
        """
        listed = listed_layer_types(config, num_layers)
        if listed is None:
            listed = tuple(self.default_layer_type(config, index) for index in range(num_layers))
        if self.window(config) is None:
            listed = tuple(FULL if layer_type == SLIDING else layer_type for layer_type in listed)
        return listed

    def default_layer_type(self, config: ConfigReader, index: int) -> str:
        """Type of layer `index` where the config has no `layer_types`: all slide once there is a
        window.
        """
        return FULL if self.window(config) is None else SLIDING

    def window(self, config: ConfigReader) -> int | None:
        """Keys a sliding layer's query sees, itself included; None where the config switches
        windows off.
        """
        window = window_of(config, default_on=self.window_default_on)
        return window + 1 if window is not None and self.window_beside_query else window

    def layer(self, config: ConfigReader, types: tuple[str, ...], index: int) -> LayerKV:
        """The declaration of layer `index`, which has KV."""
        kind = storing_kind(types[index])
        assert kind is not None, f"layer {index} has no KV"
        shape = self.head_shape(config, types, index)
        return LayerKV(
            index=index,
            kind=kind,
            num_kv_heads=shape.num_kv_heads,
            num_qo_heads=shape.num_qo_heads,
            head_dim=shape.head_dim,
            window_tokens=self.visible_tokens(config, kind),
            shares_kv_with=self.shares_kv_with(config, types, index),
            has_sinks=self.has_sinks,
            soft_cap=self.soft_cap(config),
            rotary=self.rotary(config, types, index, shape.head_dim),
        )

    def visible_tokens(self, config: ConfigReader, kind: LayerKind) -> int | None:
        """`window_tokens` of a layer of this kind."""
        if kind is LayerKind.SLIDING:
            return self.window(config)
        return config.count("attention_chunk_size") if kind is LayerKind.CHUNKED else None

    def head_shape(self, config: ConfigReader, types: tuple[str, ...], index: int) -> HeadShape:
        """Heads of layer `index`; one number for all layers or a list with one per layer."""
        num_qo_heads = config.counts("num_attention_heads", len(types))[index]
        num_kv_heads = num_qo_heads
        if config.get("num_key_value_heads") is not None:
            num_kv_heads = config.counts("num_key_value_heads", len(types))[index]
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads ({num_qo_heads}), "
                f"got {num_kv_heads} in layer {index}"
            )
        return HeadShape(
            num_kv_heads=num_kv_heads,
            num_qo_heads=num_qo_heads,
            head_dim=self.head_dim(config, num_qo_heads),
        )

    def head_dim(self, config: ConfigReader, num_qo_heads: int) -> int:
        """`head_dim`, or an equal share of `hidden_size` where the config has none."""
        if config.get("head_dim"):
            return config.count("head_dim")
        hidden_size = config.count("hidden_size")
        if hidden_size % num_qo_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads ({num_qo_heads}) "
                f"where head_dim is not given, got {hidden_size}"
            )
        return hidden_size // num_qo_heads

    def rotary(
        self, config: ConfigReader, types: tuple[str, ...], index: int, head_dim: int
    ) -> Rotary | None:
        """Rotary settings of layer `index`, None where it has none."""
        return rotary_of(
            config,
            head_dim=head_dim,
            layer_type=types[index],
            theta=self.theta,
            fraction=self.rotary_fraction,
            interleaved=self.interleaved,
        )

    def shares_kv_with(
        self, config: ConfigReader, types: tuple[str, ...], index: int
    ) -> int | None:
        """The earlier layer whose KV layer `index` reads, or None where it has its own."""
        return None

    def soft_cap(self, config: ConfigReader) -> float | None:
        """Cap of the attention logits, or None."""
        return config.number("attn_logit_softcapping")

    def retention_refusal(self, config: ConfigReader, types: tuple[str, ...]) -> str | None:
        """What rules out dropping keys of this model, as a noun phrase, or None."""
        if self.refusal is not None:
            return self.refusal
        if config.get("dual_chunk_attention_config") is not None:
            return refusals.DUAL_CHUNK
        return refusals.RECURRENT if has_recurrent_layers(types) else None
