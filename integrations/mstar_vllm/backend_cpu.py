"""The backend on CPU: vLLM's CPU attention ops behind the batch transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from mstar_vllm import rows, seeds, session
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.cpu_key_turn import KeyTurn, shared_turn
from mstar_vllm.crosscheck import check_slopes
from mstar_vllm.positions import ROLLING
from mstar_vllm.retention import BatchLimits, RetentionBackend
from mstar_vllm.ring_visibility import ring_transform, ring_view
from mstar_vllm.rolling_rows import RollingRows, Wave, written_blocks
from mstar_vllm.visibility import transform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

    from mstar_plugin.model_kv import Rotary


class MStarCPUBackend(RetentionBackend, CPUAttentionBackend):
    """`CPU_ATTN` with retention."""

    keeps_copies = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The stock backend's page: its kernels for other sizes are slower."""
        return CPUAttentionBackend.get_preferred_block_size(default_block_size)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[MStarCPUImpl]:
        return MStarCPUImpl

    @staticmethod
    def get_builder_cls() -> type[MStarCPUMetadataBuilder]:
        return MStarCPUMetadataBuilder


@dataclass
class RollingMetadata(CPUAttentionMetadata):
    """The parent's metadata of the first wave, for `num_actual_tokens` of the whole step, and all
    waves with theirs.
    """

    waves: tuple[tuple[Wave, CPUAttentionMetadata], ...] = ()


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
        active = session.activate(vllm_config)
        self._writes = active.writes if active.rolls else None
        self._rolling: RollingRows | None = None
        if isinstance(kv_cache_spec, RetentionSpec) and kv_cache_spec.positions == ROLLING:
            drafts = vllm_config.num_speculative_tokens
            self._rolling = RollingRows(self.block_size, active.writes, drafts)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        if self._writes is not None:
            self._writes.note(written_blocks(common_attn_metadata, self.block_size))
        if self._ring is not None:
            visible = ring_transform(common_attn_metadata, self._ring, self.block_size)
        else:
            limits = self._limits.current(common_attn_metadata.num_reqs)
            if self._rolling is not None and limits is not None:
                waves = self._rolling.waves(common_attn_metadata, limits)
                if waves:
                    return self._build_waves(common_attn_metadata, waves)
            visible = transform(common_attn_metadata, limits, self.block_size)
        return super().build(common_prefix_len, visible, fast_build)

    def _build_waves(
        self, batch: CommonAttentionMetadata, waves: list[Wave]
    ) -> CPUAttentionMetadata:
        built = tuple(
            (wave, super(MStarCPUMetadataBuilder, self).build(0, wave.batch)) for wave in waves
        )
        first = {**vars(built[0][1]), "num_actual_tokens": batch.num_actual_tokens}
        return RollingMetadata(**first, waves=built)


class MStarCPUImpl(CPUAttentionBackendImpl):
    """The parent's implementation, wave by wave where the batch has them; it also makes the
    server's plan known to `customize_spec`.
    """

    _key_turn: KeyTurn | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = session.activate(get_current_vllm_config()).plan
        check_slopes(plan, self.alibi_slopes)
        rows.hook_model_runner()
        seeds.hook_sampling()

    def roll(self, rotary: Rotary | None, device: torch.device) -> None:
        """Be ready for rolling positions; called before the first batch."""
        self._key_turn = shared_turn(rotary)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, RollingMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
        if self._key_turn is None:
            raise RuntimeError("a layer must be told to roll before its first batch")
        for wave, metadata in attn_metadata.waves:
            self._key_turn.copy(kv_cache, wave.copies, layer.isa)
            if wave.tokens is None:
                super().forward(layer, query, key, value, kv_cache, metadata, output, *scales)
                continue
            part = query[wave.tokens]
            attended = torch.empty_like(output[: len(part)])
            super().forward(layer, part, key, value, kv_cache, metadata, attended, *scales)
            output[wave.tokens] = attended
        return output
