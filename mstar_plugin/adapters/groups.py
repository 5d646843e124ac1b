"""Layers that store and release alike form one KV resource; this file decides which ones do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_plugin.kv.config import (
    KVLayout,
    KVSpec,
    PagedKVConfig,
    PrefixSpan,
    RetentionPolicy,
    StreamLayout,
)
from mstar_plugin.model_kv import WINDOWED_KINDS, LayerKind, LayerKV

if TYPE_CHECKING:
    from mstar_plugin.model_kv import ModelKV

DEFAULT_NODES = frozenset({"decoder"})


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """Layers of one storage: same kind, window, heads and head size. `key` is its name."""

    key: str
    layers: tuple[LayerKV, ...]

    @property
    def kind(self) -> LayerKind:
        return self.layers[0].kind

    @property
    def elements_per_token(self) -> int:
        """Elements one token stores over the group's layers."""
        return sum(layer.elements_per_token for layer in self.layers)


def kv_groups(model: ModelKV, *, max_seq_len: int | None = None) -> tuple[KVGroup, ...]:
    """The model's KV resources in the order of their first layer; layers that read another layer's
    KV store none.

    A window of at least `max_seq_len` tokens never hides a key, so such layers count as full ones.
    """
    found: dict[tuple[object, ...], list[LayerKV]] = {}
    for layer in model.storing_layers:
        found.setdefault(_storage(layer, max_seq_len), []).append(layer)
    keys = _distinct_keys(list(found))
    return tuple(
        KVGroup(key=key, layers=tuple(layers))
        for key, layers in zip(keys, found.values(), strict=True)
    )


def _storage(layer: LayerKV, max_seq_len: int | None) -> tuple[object, ...]:
    kind, window = layer.kind, layer.window_tokens
    if max_seq_len is not None and window is not None and window >= max_seq_len:
        kind, window = LayerKind.FULL, None
    return (
        kind,
        window,
        layer.num_kv_heads,
        layer.head_dim,
        layer.num_qo_heads,
        layer.kv_lora_rank,
    )


def _distinct_keys(storages: list[tuple[object, ...]]) -> list[str]:
    """`full`, `sliding_512`, ...; a second group of the same kind and window names heads."""
    keys: list[str] = []
    for kind, window, num_kv_heads, head_dim, num_qo_heads, _ in storages:
        key = f"{kind}" if window is None else f"{kind}_{window}"
        if key in keys:
            key = f"{key}_{num_kv_heads}x{head_dim}"
        if key in keys:
            key = f"{key}_q{num_qo_heads}"
        keys.append(key)
    return keys


def kv_specs_of(
    model: ModelKV, *, nodes: frozenset[str], max_seq_len: int | None
) -> tuple[KVSpec, ...]:
    """One `KVSpec` per group. Raises ValueError where nothing bounds the positions."""
    if model.ring is not None:
        return (KVSpec(resource_key=LayerKind.RING.value, nodes=set(nodes), config=model.ring),)
    bound = max_seq_len if max_seq_len is not None else model.max_positions
    if bound is None:
        raise ValueError(
            f"max_seq_len must be given for {model.architecture}, whose config bounds no positions"
        )
    return tuple(
        KVSpec(resource_key=group.key, nodes=set(nodes), config=_paged_config(group, bound))
        for group in kv_groups(model, max_seq_len=bound)
    )


def _paged_config(group: KVGroup, max_seq_len: int) -> PagedKVConfig:
    first = group.layers[0]
    is_mla = first.kind is LayerKind.MLA
    return PagedKVConfig(
        num_layers=len(group.layers),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        num_qo_heads=first.num_qo_heads,
        max_seq_len=max_seq_len,
        layout=KVLayout.MLA if is_mla else KVLayout.NHD,
        kv_lora_rank=first.kv_lora_rank,
        qk_rope_head_dim=first.qk_rope_head_dim,
    )


def layouts_of(
    model: ModelKV,
    *,
    prompt_tokens: int,
    tokens_per_iteration: int,
    retention: RetentionPolicy | None,
) -> dict[str, dict[str, StreamLayout]]:
    """Layout of the one stream "main" per group; a ring cache keeps no stream and has none."""
    if model.ring is not None:
        return {}
    policy = retention if retention is not None else model.retention
    if policy is not None and model.retention_refusal is not None:
        raise ValueError(
            f"retention must be left out for {model.architecture}: {model.retention_refusal}"
        )
    return {
        group.key: {
            "main": StreamLayout(
                spans=(PrefixSpan(length=prompt_tokens, advance=prompt_tokens, walk="prefill"),),
                growth=(("decode", tokens_per_iteration),),
                retention=None if group.kind in WINDOWED_KINDS else policy,
            )
        }
        for group in kv_groups(model)
    }
