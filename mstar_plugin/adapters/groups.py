"""Layers that store and release alike form one KV resource; this file decides which ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """Layers of one storage: same kind, window, heads and head size. `key` is its name.

    `kind` and `window_tokens` are those in force: a window nothing ever leaves is none.
    """

    key: str
    kind: LayerKind
    window_tokens: int | None
    layers: tuple[LayerKV, ...]

    @property
    def elements_per_token(self) -> int:
        """Elements one token stores over the group's layers."""
        return sum(layer.elements_per_token for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Storage:
    kind: LayerKind
    window_tokens: int | None
    num_kv_heads: int
    num_qo_heads: int
    head_dim: int
    kv_lora_rank: int | None


def kv_groups(model: ModelKV, *, max_seq_len: int | None = None) -> tuple[KVGroup, ...]:
    """The model's KV resources in the order of their first layer.

    Layers that read another layer's KV store none. A window of at least `max_seq_len` tokens (by
    default the model's own bound) never hides a key, so such layers count as full ones.
    """
    bound = max_seq_len if max_seq_len is not None else model.max_positions
    found: dict[_Storage, list[LayerKV]] = {}
    for layer in model.storing_layers:
        found.setdefault(_storage(layer, bound), []).append(layer)
    return tuple(
        KVGroup(
            key=key,
            kind=storage.kind,
            window_tokens=storage.window_tokens,
            layers=tuple(found[storage]),
        )
        for key, storage in _named(found)
    )


def _storage(layer: LayerKV, max_seq_len: int | None) -> _Storage:
    kind, window = layer.kind, layer.window_tokens
    if max_seq_len is not None and window is not None and window >= max_seq_len:
        kind, window = LayerKind.FULL, None
    return _Storage(
        kind=kind,
        window_tokens=window,
        num_kv_heads=layer.num_kv_heads,
        num_qo_heads=layer.num_qo_heads,
        head_dim=layer.head_dim,
        kv_lora_rank=layer.kv_lora_rank,
    )


def _named(storages: Iterable[_Storage]) -> Iterator[tuple[str, _Storage]]:
    """`full`, `sliding_512`, ...; a second group of the same kind and window names its heads."""
    taken: set[str] = set()
    for storage in storages:
        window = storage.window_tokens
        key = storage.kind.value if window is None else f"{storage.kind.value}_{window}"
        if key in taken:
            key = f"{key}_{storage.num_kv_heads}x{storage.head_dim}"
        if key in taken:
            key = f"{key}_q{storage.num_qo_heads}"
        taken.add(key)
        yield key, storage


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
    max_seq_len: int | None,
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
        for group in kv_groups(model, max_seq_len=max_seq_len)
    }
