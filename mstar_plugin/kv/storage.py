"""The shape of a KV cache: model geometry, and the two ways of storing it (pages, rings).

A config object is shared by the KV resource and the attention planned against it, and is patched in
place by the deployment (`apply_yaml_overrides`) and by the rank that builds it (`shard`).
`dataclasses.replace` on a sharded config would take the narrowed head counts for the model's; use
`copy.copy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from mstar_plugin.kv.layout import require_count
from mstar_plugin.spec import NodeResourceSpec

if TYPE_CHECKING:
    from mstar_plugin.spec import Resource


class KVLayout(Enum):
    """What one page holds per layer.

    NHD: `[2, page_size, num_kv_heads, head_dim]`, K at index 0 and V at 1. MLA: `[page_size,
    latent_dim]`, one latent row per token (compressed KV, then the rotary part of the key) and no
    V.
    """

    MLA = "MLA"
    NHD = "NHD"


@dataclass(kw_only=True)
class KVConfig(ABC):
    """The checkpoint's attention geometry, whatever stores it. `num_qo_heads=None` means
    `num_kv_heads`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_qo_heads: int | None = None
    _model_kv_heads: int = field(init=False, repr=False, compare=False)
    _model_qo_heads: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_qo_heads is None:
            self.num_qo_heads = self.num_kv_heads
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_qo_heads"):
            require_count(name, getattr(self, name), 1)
        self._model_kv_heads = self.num_kv_heads
        self._model_qo_heads = self.num_qo_heads

    @abstractmethod
    def apply_yaml_overrides(self, **kwargs: Any) -> None:
        """Set this deployment's values; `TypeError` for a key it cannot choose."""

    def shard(self, num_shards: int) -> None:
        """Narrow the head counts to one of `num_shards` ranks (tensor times sequence parallel).

        Always starts from the model's counts, so calling it again gives the same. KV heads are
        replicated once there are as many ranks as heads. `AssertionError` when a count does not
        divide.
        Example: 8 KV and 32 query heads -> 4 and 16 for 2 ranks, 1 and 2 for 16.
        """
        require_count("num_shards", num_shards, 1)
        kv_heads = 1
        if num_shards < self._model_kv_heads:
            kv_heads = _divide("num_kv_heads", self._model_kv_heads, num_shards)
        self.num_qo_heads = _divide("num_qo_heads", self._model_qo_heads, num_shards)
        self.num_kv_heads = kv_heads


@dataclass(kw_only=True)
class PagedKVConfig(KVConfig):
    """Fixed-size pages, appended to as a stream grows.

    `max_seq_len` bounds the positions of one label. `max_num_pages` counts page 0, which no stream
    ever owns. `cpu_offload_pages` is the size of the host pool, 0 for none. `prefix_cache` shares
    sealed pages between requests, within one `prefix_cache_salt`; over several ranks only with
    `prefix_cache_tp`, where the ranks agree on the shortest of their matches before admission.
    `kv_lora_rank` and `qk_rope_head_dim` (elements) belong to `KVLayout.MLA`, which fixes
    `num_kv_heads` to 1 and `head_dim` to their sum. `qo_heads_given` tells whether the caller
    passed `num_qo_heads`: under MLA the default of 1 is never right, so MLA attention needs it
    given.
    """

    max_seq_len: int
    max_num_pages: int = 2048
    page_size: int = 128
    layout: KVLayout = KVLayout.NHD
    cpu_offload_pages: int = 0
    prefix_cache_salt: str = ""
    prefix_cache: bool = True
    prefix_cache_tp: bool = False
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qo_heads_given: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.qo_heads_given = self.num_qo_heads is not None
        self.layout = KVLayout(self.layout)
        if self.layout is KVLayout.MLA:
            self._adopt_latent_geometry()
        super().__post_init__()
        for name in _MINIMUM:
            require_count(name, getattr(self, name), _MINIMUM[name])

    def apply_yaml_overrides(  # type: ignore[override]  # the accepted keys are the signature
        self,
        max_num_pages: int | None = None,
        page_size: int | None = None,
        max_seq_len: int | None = None,
        cpu_offload_pages: int | None = None,
        prefix_cache_salt: str | None = None,
        prefix_cache: bool | None = None,
        prefix_cache_tp: bool | None = None,
    ) -> None:
        """How much cache this deployment gets and how it is cut; only None leaves a value."""
        counts = {
            "max_num_pages": max_num_pages,
            "page_size": page_size,
            "max_seq_len": max_seq_len,
            "cpu_offload_pages": cpu_offload_pages,
        }
        for name, count in counts.items():
            if count is not None:
                require_count(name, count, _MINIMUM[name])
        self._assign(counts)
        self._assign(
            {
                "prefix_cache_salt": prefix_cache_salt,
                "prefix_cache": prefix_cache,
                "prefix_cache_tp": prefix_cache_tp,
            }
        )

    @property
    def latent_dim(self) -> int:
        """Elements per token and layer under MLA. Example: rank 512 and rope 64 -> 576."""
        if self.layout is not KVLayout.MLA:
            raise AssertionError(f"latent_dim belongs to MLA, this layout is {self.layout.name}")
        return self.head_dim

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """NHD `[layers, pages, 2, page_size, kv_heads, head_dim]`, MLA `[layers, pages, page_size,
        latent_dim]`.
        """
        head = (self.num_layers, self.max_num_pages)
        if self.layout is KVLayout.MLA:
            return (*head, self.page_size, self.head_dim)
        return (*head, 2, self.page_size, self.num_kv_heads, self.head_dim)

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page over all layers, for elements of `itemsize` bytes.

        Example: 28 layers, 8 heads of 128, S=128, itemsize 2 -> 14 MiB.
        """
        num_elements = self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return num_elements * itemsize * (1 if self.layout is KVLayout.MLA else 2)

    def _adopt_latent_geometry(self) -> None:
        if self.kv_lora_rank is None or self.qk_rope_head_dim is None:
            raise ValueError(
                "layout MLA needs both kv_lora_rank and qk_rope_head_dim, "
                f"got {self.kv_lora_rank} and {self.qk_rope_head_dim}"
            )
        require_count("kv_lora_rank", self.kv_lora_rank, 1)
        require_count("qk_rope_head_dim", self.qk_rope_head_dim, 0)
        self.num_kv_heads = 1
        self.head_dim = self.kv_lora_rank + self.qk_rope_head_dim

    def _assign(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if value is not None:
                setattr(self, name, value)


_MINIMUM = {"max_seq_len": 1, "max_num_pages": 2, "page_size": 1, "cpu_offload_pages": 0}


@dataclass(frozen=True)
class RingKVLayerConfig:
    """One layer's ring: `ring_frames` slots kept beside the frame being written, `ring_buckets` of
    them in turn overwritten, and every `pinned_dilation`-th frame kept for good. Checked by the
    cache that is built from it.
    """

    ring_frames: int
    ring_buckets: int
    pinned_dilation: int


@dataclass(kw_only=True)
class RingKVConfig(KVConfig):
    """A fixed horizon of frame slots per layer, allocated once and overwritten in place.

    `tokens_per_frame` tokens make a frame, `layers` holds one geometry per layer, `num_sessions`
    requests can be resident.
    """

    tokens_per_frame: int
    layers: tuple[RingKVLayerConfig, ...]
    num_sessions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("tokens_per_frame", self.tokens_per_frame, 1)
        require_count("num_sessions", self.num_sessions, 1)
        self.layers = tuple(self.layers)
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"layers must hold num_layers={self.num_layers} ring geometries, "
                f"got {len(self.layers)}"
            )

    def apply_yaml_overrides(self, num_sessions: int | None = None, **kwargs: Any) -> None:
        """Set `num_sessions`, the only value of a ring a deployment chooses."""
        if kwargs:
            raise TypeError(
                "a ring KV cache takes the override num_sessions only, "
                f"got {', '.join(sorted(kwargs))}"
            )
        if num_sessions is not None:
            require_count("num_sessions", num_sessions, 1)
            self.num_sessions = num_sessions

    @property
    def total_sessions(self) -> int:
        """Resident sessions plus the one that padding rows share, whose index is `num_sessions`."""
        return self.num_sessions + 1


@dataclass
class KVSpec(NodeResourceSpec):
    """A KV cache as a model declares it: the key it is known by, the nodes that use it, and its
    shape.
    """

    config: KVConfig

    def apply_yaml_overrides(self, **kwargs: Any) -> None:
        """Hand the deployment's values to the config, which knows the keys it takes."""
        self.config.apply_yaml_overrides(**kwargs)

    @property
    def resource_class(self) -> type[Resource]:
        """`RingKVManager` for a ring, `KVManager` otherwise; imported here and not before."""
        if isinstance(self.config, RingKVConfig):
            from mstar_plugin.ring.manager import RingKVManager

            return RingKVManager
        from mstar_plugin.kv.manager import KVManager

        return KVManager


def _divide(name: str, count: int, num_shards: int) -> int:
    if count % num_shards:
        raise AssertionError(f"{name}={count} does not divide into {num_shards} shards")
    return count // num_shards
