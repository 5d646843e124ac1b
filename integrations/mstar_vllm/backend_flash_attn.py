"""The backend over vLLM's FlashAttention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.cuda_start import start_layer
from mstar_vllm.device_head import Attended, ProtectedAttention
from mstar_vllm.device_rows import HeadRows
from mstar_vllm.device_visibility import RollingBatch, device_visibility, is_bounded
from mstar_vllm.retention import RetentionBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from mstar_plugin.model_kv import Rotary


class MStarFlashAttentionBackend(RetentionBackend, FlashAttentionBackend):
    """`FLASH_ATTN` with retention."""

    @staticmethod
    def get_impl_cls() -> type[MStarFlashAttentionImpl]:
        return MStarFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MStarFlashAttentionMetadataBuilder]:
        return MStarFlashAttentionMetadataBuilder


@dataclass(kw_only=True)
class RollingMetadata(FlashAttentionMetadata):
    """The parent's metadata of what rows see at its own distance, and the protected pages they see
    apart; a row that does holds at most `most_apart_queries` tokens.
    """

    head: HeadRows
    most_apart_queries: int


class MStarFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds the parent's metadata for the batch as its rows see it."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._visibility = device_visibility(kv_cache_spec, vllm_config, device, False)
        if self._visibility is not None:
            # Both would put the runner's own tables and lengths back.
            self.supports_update_block_table = False
            self.supports_draft_decode_metadata_update = False
        if isinstance(kv_cache_spec, RetentionSpec) and kv_cache_spec.turned_blocks():
            layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
            for name in layer_names:
                layers[name].impl.warm_up(kv_cache_spec, device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """The parent's, but a graph over a mixed batch cannot hold rows that come and go."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if is_bounded(kv_cache_spec) and support is AttentionCGSupport.ALWAYS:
            return AttentionCGSupport.UNIFORM_BATCH
        return support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        if self._visibility is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        seen = self._visibility.visible(common_attn_metadata)
        # The parent's schedule buffer is made for requests, of which there are fewer than rows.
        fast_build = fast_build or seen.num_reqs > common_attn_metadata.num_reqs
        metadata = super().build(common_prefix_len, seen, fast_build)
        if not isinstance(seen, RollingBatch):
            return metadata
        most = min(seen.max_query_len, seen.page_tokens)
        return RollingMetadata(**vars(metadata), head=seen.head, most_apart_queries=most)


class MStarFlashAttentionImpl(FlashAttentionImpl):
    """The parent's implementation, in two parts where rows see their protected pages apart; it also
    makes the server's plan known to `customize_spec`.
    """

    _protected: ProtectedAttention | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        start_layer(self)

    def roll(self, rotary: Rotary | None, device: torch.device) -> None:
        """Be ready for rolling positions; called before the first batch."""
        if self.fa4_hd256:
            raise ValueError(
                "mstar cannot keep positions 'rolling' with FlashAttention 4's kernel for heads of "
                "256; use 'absolute'"
            )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._protected = ProtectedAttention(
            rotary, device, self.scale, self.logits_soft_cap, processors
        )

    def warm_up(self, spec: RetentionSpec, device: torch.device) -> None:
        """Compile what rows that see their protected pages apart will launch."""
        if self._protected is None:
            raise RuntimeError("a layer must be told to roll before it is warmed up")
        shape = (1, spec.block_size, self.num_kv_heads, 2 * self.head_size)
        cache = torch.zeros(shape, dtype=spec.dtype, device=device)
        self._protected.warm_up(cache, self.num_heads, spec.turned_blocks(), spec.page_tokens)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = (output_scale, output_block_scale)
        if isinstance(attn_metadata, RollingMetadata) and scales == (None, None):
            count = attn_metadata.num_actual_tokens
            self._attend_apart(query[:count], kv_cache, attn_metadata, output[:count])
            return output
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def _attend_apart(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: RollingMetadata,
        output: torch.Tensor,
    ) -> None:
        """query, output: `[T, heads, head size]`."""
        if self._protected is None:
            raise RuntimeError("a layer must be told to roll before its first batch")
        kernels: Any = fa_utils
        tokens_first = kv_cache.transpose(1, 2)
        keys, values = tokens_first[..., : self.head_size], tokens_first[..., self.head_size :]
        _, log_sums = kernels.flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            out=output,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.max_query_len,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
            causal=True,
            seqused_k=rows.seq_lens,
            max_seqlen_k=rows.max_seq_len,
            block_table=rows.block_table,
            scheduler_metadata=rows.scheduler_metadata,
            num_splits=rows.max_num_splits,
        )
        attended = Attended(output=output, log_sums=log_sums)
        self._protected.add(
            attended,
            query,
            keys,
            values,
            rows.query_start_loc,
            rows.head,
            rows.most_apart_queries,
        )
