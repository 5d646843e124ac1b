"""The backend over vLLM's FlashAttention kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from mstar_vllm.cuda_start import start_layer
from mstar_vllm.device_visibility import device_visibility, is_bounded
from mstar_vllm.retention import RetentionBackend

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class MStarFlashAttentionBackend(RetentionBackend, FlashAttentionBackend):
    """`FLASH_ATTN` with retention."""

    @staticmethod
    def get_impl_cls() -> type[MStarFlashAttentionImpl]:
        return MStarFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MStarFlashAttentionMetadataBuilder]:
        return MStarFlashAttentionMetadataBuilder


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
        return super().build(common_prefix_len, seen, fast_build)


class MStarFlashAttentionImpl(FlashAttentionImpl):
    """The parent's implementation; it also makes the server's plan known to `customize_spec`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        start_layer(self)
