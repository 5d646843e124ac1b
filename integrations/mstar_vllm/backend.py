"""The backend classes: the one for this machine's platform, under the name it is registered by."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from mstar_vllm.backend_cpu import MStarCPUBackend as MStarBackend
elif current_platform.is_cuda():
    from mstar_vllm.backend_flash_attn import MStarFlashAttentionBackend as MStarBackend
else:
    raise NotImplementedError(
        f"mstar has no kernels for {current_platform.device_name}; it supports CPU and CUDA"
    )

__all__ = ["MStarBackend", "backend_class"]


def backend_class(kernels: str | None) -> Any:
    """The class for the `kernels` setting, which only CUDA gives a choice of."""
    if current_platform.is_cuda() and kernels == "flashinfer":
        from mstar_vllm.backend_flashinfer import MStarFlashInferBackend

        return MStarFlashInferBackend
    return MStarBackend
