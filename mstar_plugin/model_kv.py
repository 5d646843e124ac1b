"""What a model's KV looks like, layer by layer: the record an adapter makes of a config.

Engine-neutral and free of tensors. Head counts are those of the whole model (before tensor
parallelism), windows and positions are tokens, `head_dim` and ranks are elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstar_plugin.kv.config import RetentionPolicy, RingKVConfig


class LayerKind(StrEnum):
    """Which keys a layer's queries may see, and how one token is stored."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    RING = "ring"


WINDOWED_KINDS = frozenset({LayerKind.SLIDING, LayerKind.CHUNKED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How a layer turns its queries and keys by position; a layer without one has `rotary=None`.

    theta: base of the frequencies. rotary_dim: leading elements of a head that are turned.
    interleaved: True when neighbouring elements (0, 1), (2, 3) form a pair, False when element i is
    paired with i + rotary_dim / 2. scaling: name of the frequency scheme ("llama3", "yarn",
    "longrope", "mrope", ...) or None for plain ones, and `parameters` its settings as sorted `(key,
    value)` pairs, sequences as tuples.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: str | None = None
    parameters: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"theta must be positive, got {self.theta}")
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and positive, got {self.rotary_dim}")
        hash(self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKV:
    """The KV of one decoder layer.

    index: position of the layer in the decoder. window_tokens: for SLIDING the number of keys a
    query sees, itself included; for CHUNKED the length of a chunk; None for the other kinds.
    shares_kv_with: index of an earlier layer whose KV this layer reads instead of writing its own.
    soft_cap: attention logits are squashed by `cap * tanh(logits / cap)`. kv_lora_rank,
    qk_rope_head_dim: MLA only; one token then stores `kv_lora_rank + qk_rope_head_dim` elements, no
    matter how many heads, and `head_dim` is that sum.
    """

    index: int
    kind: LayerKind
    num_kv_heads: int
    num_qo_heads: int
    head_dim: int
    window_tokens: int | None = None
    shares_kv_with: int | None = None
    has_sinks: bool = False
    soft_cap: float | None = None
    rotary: Rotary | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_window()
        self._check_latent()

    def _check_counts(self) -> None:
        for name in ("num_kv_heads", "num_qo_heads", "head_dim"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} of layer {self.index} must be positive, got {value}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads of layer {self.index} must be a multiple of num_kv_heads, "
                f"got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        if self.shares_kv_with is not None and not 0 <= self.shares_kv_with < self.index:
            raise ValueError(
                f"shares_kv_with of layer {self.index} must name an earlier layer, "
                f"got {self.shares_kv_with}"
            )

    def _check_window(self) -> None:
        if (self.kind in WINDOWED_KINDS) != (self.window_tokens is not None):
            raise ValueError(
                f"window_tokens of layer {self.index} must be given for sliding and chunked layers "
                f"only, got {self.window_tokens} for a {self.kind} layer"
            )
        if self.window_tokens is not None and self.window_tokens <= 0:
            raise ValueError(
                f"window_tokens of layer {self.index} must be positive, got {self.window_tokens}"
            )

    def _check_latent(self) -> None:
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        if self.kind is not LayerKind.MLA:
            if rank is not None or rope is not None:
                raise ValueError(
                    f"kv_lora_rank of layer {self.index} is for MLA layers, got {rank}"
                )
        elif rank is None or rope is None or rank + rope != self.head_dim or self.num_kv_heads != 1:
            raise ValueError(
                f"layer {self.index} is MLA: one KV head of kv_lora_rank + qk_rope_head_dim "
                f"elements, got {self.num_kv_heads} of {self.head_dim} for {rank} + {rope}"
            )

    @property
    def elements_per_token(self) -> int:
        """Elements one token stores here. Example: 8 heads of 128 -> 2048; MLA 512 + 64 -> 576."""
        if self.shares_kv_with is not None:
            return 0
        if self.kind is LayerKind.MLA:
            return self.head_dim
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelKV:
    """All layers of a model that have attention KV, and what bounds them.

    layers: ascending by index; recurrent and other layers without KV are left out. max_positions:
    most positions the checkpoint was made for. retention: the policy to use where the operator
    gives none. retention_refusal: what rules out dropping keys, as a noun phrase ("learned
    positions, whose table ends"), or None. ring: geometry of a ring cache for models that keep
    frames and not a growing sequence.
    """

    architecture: str
    layers: tuple[LayerKV, ...]
    max_positions: int | None = None
    retention: RetentionPolicy | None = None
    retention_refusal: str | None = None
    ring: RingKVConfig | None = None

    def __post_init__(self) -> None:
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise ValueError(f"layers must ascend by index without repeats, got {indices}")
        for layer in self.layers:
            if layer.shares_kv_with is not None and layer.shares_kv_with not in indices:
                raise ValueError(
                    f"shares_kv_with of layer {layer.index} must name a layer with KV, "
                    f"got {layer.shares_kv_with}"
                )
        if self.retention is not None and self.retention_refusal is not None:
            raise ValueError(
                f"retention must be left out where it is refused ({self.retention_refusal}), "
                f"got {self.retention}"
            )

    @property
    def storing_layers(self) -> tuple[LayerKV, ...]:
        """The layers that write KV of their own."""
        return tuple(layer for layer in self.layers if layer.shares_kv_with is None)

    @property
    def elements_per_token(self) -> int:
        """Elements one token stores over all layers."""
        return sum(layer.elements_per_token for layer in self.layers)
