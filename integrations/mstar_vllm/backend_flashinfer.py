"""The backend over vLLM's FlashInfer kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
)
from vllm.v1.utils import CpuGpuBuffer

from mstar_plugin.attention.plan_in_flight import PlanInFlight
from mstar_vllm.cuda_start import start_layer
from mstar_vllm.device_visibility import device_visibility, is_bounded
from mstar_vllm.retention import RetentionBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class MStarFlashInferBackend(RetentionBackend, FlashInferBackend):
    """`FLASHINFER` with retention."""

    @staticmethod
    def get_impl_cls() -> type[MStarFlashInferImpl]:
        return MStarFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[MStarFlashInferMetadataBuilder]:
        return MStarFlashInferMetadataBuilder


class MStarFlashInferMetadataBuilder(FlashInferMetadataBuilder):
    """Builds the parent's metadata for the batch as its rows see it."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._visibility = device_visibility(kv_cache_spec, vllm_config, device, True)
        self._row_buffers = RowPlanBuffers(device)
        self._plan = PlanInFlight(device)
        if self._visibility is not None:
            # It would advance the runner's own lengths.
            self.supports_draft_decode_metadata_update = False

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """The parent's, but a graph cannot follow rows that are cut on the host."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if is_bounded(kv_cache_spec) and support is AttentionCGSupport.UNIFORM_BATCH:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        batch = common_attn_metadata
        seen = batch if self._visibility is None else self._visibility.visible(batch)
        has_rows = seen is not batch and batch.max_query_len > 1
        if has_rows:
            self._row_buffers.reserve(seen, self.page_size)
        buffers = self._planning_rows(seen.num_reqs) if has_rows else nullcontext()
        with self._plan.replaced_by(None), buffers:
            return super().build(common_prefix_len, seen, fast_build)

    @contextmanager
    def _planning_rows(self, num_rows: int) -> Iterator[None]:
        """Let the parent plan into buffers made for rows.

        Its own hold as many rows as there can be requests, and captured graphs read them, as do the
        wrappers and the masks of drafts that it keeps for graphs.
        """
        made: dict[str, Any] = {
            **{name: getattr(self._row_buffers, name) for name in RowPlanBuffers.NAMES},
            "enable_cuda_graph": False,
            "max_num_reqs": num_rows,
            "_decode_mask_cache": {},
        }
        own = {name: getattr(self, name) for name in made}
        vars(self).update(made)
        try:
            yield
        finally:
            vars(self).update(own)


class RowPlanBuffers:
    """The parent's planning buffers, of the same names, as large as the rows of a batch ask."""

    NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_rows = -1
        self.paged_kv_indices = torch.zeros(0, dtype=torch.int32, device=device)
        self.paged_kv_indptr: CpuGpuBuffer
        self.paged_kv_last_page_len: CpuGpuBuffer

    def reserve(self, batch: CommonAttentionMetadata, page_tokens: int) -> None:
        """Make room for the rows of `batch`."""
        assert batch.seq_lens_cpu_upper_bound is not None, "rows are planned on the host"
        lens = batch.seq_lens_cpu_upper_bound.numpy()
        num_pages = int((-(-lens // page_tokens)).sum())
        if num_pages > self.paged_kv_indices.shape[0]:
            self.paged_kv_indices = torch.zeros(
                2 * num_pages, dtype=torch.int32, device=self._device
            )
        if batch.num_reqs > self._num_rows:
            self._num_rows = 2 * batch.num_reqs
            self.paged_kv_indptr = self._row_buffer(self._num_rows + 1)
            self.paged_kv_last_page_len = self._row_buffer(self._num_rows)

    def _row_buffer(self, num_rows: int) -> CpuGpuBuffer:
        return CpuGpuBuffer(num_rows, dtype=torch.int32, device=self._device, pin_memory=False)


class MStarFlashInferImpl(FlashInferImpl):
    """The parent's implementation; it also makes the server's plan known to `customize_spec`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        start_layer(self)
