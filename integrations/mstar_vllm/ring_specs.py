"""KV cache specs of layers that keep rings: one page a frame, a fixed number of pages a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, replace_as

from mstar_plugin.ring.paging import FramePages
from mstar_vllm.cache_specs import NOT_OURS, is_special
from mstar_vllm.ring_plan import RingPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):
    """A layer that keeps a ring of frames.

    Layers of one geometry are a group. `frame_tokens` stays when a kernel cuts pages into smaller
    blocks.
    """

    frame_tokens: int
    """Tokens of a frame, which is the page of the scheduler."""
    ring_buckets: int
    """Kept frames that a query sees."""
    pinned_dilation: int
    """Every how many frames one is kept."""
    chunk_frames: int
    """Most frames of one request that one step can touch."""

    @property
    def pages(self) -> FramePages:
        """The pages of one request."""
        return FramePages(
            dilation=self.pinned_dilation,
            buckets=self.ring_buckets,
            chunk_frames=self.chunk_frames,
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.pages.num_pages * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


def ring_specs(plan: RingPlan, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The layers' specs with the rings of `plan`, by layer name.

    ValueError where a layer is not plain full attention, whose frames a ring could drop.
    """
    return {name: _ring_spec(plan, name, spec) for name, spec in specs.items()}


def _ring_spec(plan: RingPlan, name: str, spec: Any) -> KVCacheSpec:
    if isinstance(spec, RingSpec):
        return spec
    if type(spec) is not FullAttentionSpec or is_special(spec):
        raise ValueError(
            f"mstar keeps rings in layers of plain full attention, got {type(spec).__name__} for "
            f"{name}; leave out the ring"
        )
    pages = plan.pages(extract_layer_index(name))
    return replace_as(
        spec,
        RingSpec,
        drop=NOT_OURS,
        block_size=plan.tokens_per_frame,
        frame_tokens=plan.tokens_per_frame,
        ring_buckets=pages.buckets,
        pinned_dilation=pages.dilation,
        chunk_frames=pages.chunk_frames,
    )
