"""The backend on CPU: vLLM's CPU attention ops behind the batch transform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from mstar_vllm import rows, session
from mstar_vllm.retention import BatchLimits, RetentionBackend
from mstar_vllm.ring_visibility import ring_transform, ring_view
from mstar_vllm.visibility import transform

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


class MStarCPUBackend(RetentionBackend, CPUAttentionBackend):
    """`CPU_ATTN` with retention."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[MStarCPUImpl]:
        return MStarCPUImpl

    @staticmethod
    def get_builder_cls() -> type[MStarCPUMetadataBuilder]:
        return MStarCPUMetadataBuilder


class MStarCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the parent's metadata for the batch as its rows see it."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._limits = BatchLimits(kv_cache_spec)
        self._ring = ring_view(kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        if self._ring is not None:
            visible = ring_transform(common_attn_metadata, self._ring, self.block_size)
        else:
            limits = self._limits.current(common_attn_metadata.num_reqs)
            visible = transform(common_attn_metadata, limits, self.block_size)
        return super().build(common_prefix_len, visible, fast_build)


class MStarCPUImpl(CPUAttentionBackendImpl):
    """The parent's implementation; it also makes the server's plan known to `customize_spec`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = session.activate(get_current_vllm_config()).plan
        if self.alibi_slopes is not None and plan.obstacle is None:
            raise ValueError(
                "the model uses ALiBi, which its adapter must declare in retention_refusal; "
                f"adapter: {plan.adapter}"
            )
        rows.hook_model_runner()
