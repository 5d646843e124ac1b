"""What a call of paged attention is: its parameters, the checks on its arguments, its result.

Letters: `T` query tokens of all rows, `R` rows, `Hq` query heads, `Hk` KV heads, `D` head dim, `Dv`
the value's width, `N` pages of the pool, `S` page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from mstar_plugin.kv.config import KVLayout, PagedKVConfig
from mstar_plugin.kv.plan import KVPlanOutput, PagedIndptrs


class AttentionResult(NamedTuple):
    """`output` `[T, Hq, Dv]` of the query's dtype, and `lse` `[T, Hq]` float32.

    `lse` is the natural logarithm of the sum of exponentiated scores. A query that sees nothing has
    output 0 and lse -inf, so that merging it with another result leaves the other.
    """

    output: Tensor
    lse: Tensor


class PlannedAttention(Protocol):
    """One step's attention with its index work done; `run` is called once per layer."""

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Geometry and mathematics of attention over one pool.

    Under `KVLayout.NHD` a layer of the pool is `[N, 2, S, Hk, D]`, `D` is `head_dim`. Under
    `KVLayout.MLA` it is `[N, S, D]`: queries are in latent space, every head reads the row as its
    key and the first `kv_lora_rank` elements as its value. `causal` lets query `i` of `q` see all
    but the last `q - 1 - i` tokens of its row. `scale` multiplies the scores (default `D ** -0.5`,
    required under MLA where the latent width says nothing about it); `soft_cap` c then turns a
    score x into `c * tanh(x / c)`.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    layout: KVLayout = KVLayout.NHD
    kv_lora_rank: int | None = None
    causal: bool = True
    scale: float | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_qo_heads}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")
        if self.is_latent and (self.scale is None or self.kv_lora_rank is None):
            raise ValueError(
                f"layout MLA needs scale and kv_lora_rank, got {self.scale} and {self.kv_lora_rank}"
            )

    @classmethod
    def from_config(
        cls,
        config: PagedKVConfig,
        *,
        causal: bool = True,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> AttentionParams:
        """The parameters of the pool `config` describes, at its current sharding."""
        if config.layout is KVLayout.MLA and not config.qo_heads_given:
            raise ValueError(
                "layout MLA needs num_qo_heads given in the KV config, it was left out"
            )
        assert config.num_qo_heads is not None, "the config fills it in"
        return cls(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=config.page_size,
            layout=config.layout,
            kv_lora_rank=config.kv_lora_rank,
            causal=causal,
            scale=scale,
            soft_cap=soft_cap,
        )

    @property
    def is_latent(self) -> bool:
        return self.layout is KVLayout.MLA

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        """`Dv`: `head_dim`, or `kv_lora_rank` under MLA."""
        return self.head_dim if self.kv_lora_rank is None else self.kv_lora_rank

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page of one layer."""
        if self.is_latent:
            return (self.page_size, self.head_dim)
        return (2, self.page_size, self.num_kv_heads, self.head_dim)


def indptrs_of(plan: KVPlanOutput | PagedIndptrs) -> PagedIndptrs:
    """The host index arrays of a plan."""
    return plan.cpu_indptrs if isinstance(plan, KVPlanOutput) else plan


def row_kv_lens(indptrs: PagedIndptrs, page_size: int) -> Tensor:
    """Tokens on each row's pages: int32 `[R]` on the host."""
    if indptrs.kv_lens is not None:
        return indptrs.kv_lens
    num_pages = indptrs.paged_kv_indptr.diff()
    lens = (num_pages - 1) * page_size + indptrs.paged_kv_last_page_len
    return lens.masked_fill(num_pages == 0, 0)


def check_tensors(
    query: Tensor, kv_cache: Tensor, num_tokens: int, params: AttentionParams
) -> None:
    """`ValueError` unless query and cache have the shapes, dtypes and device the plan needs."""
    expected = (num_tokens, params.num_qo_heads, params.head_dim)
    if tuple(query.shape) != expected:
        raise ValueError(f"query must have shape {expected}, got {tuple(query.shape)}")
    if tuple(kv_cache.shape[1:]) != params.page_shape:
        raise ValueError(
            f"kv_cache must have shape (pages, {', '.join(map(str, params.page_shape))}), "
            f"got {tuple(kv_cache.shape)}"
        )
    if not (query.is_floating_point() and kv_cache.is_floating_point()):
        raise ValueError(
            f"query and kv_cache must be floating point, got {query.dtype} and {kv_cache.dtype}"
        )
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache must be contiguous, got strides {kv_cache.stride()}")
    if query.device != kv_cache.device:
        raise ValueError(
            f"query and kv_cache must be on one device, got {query.device} and {kv_cache.device}"
        )
