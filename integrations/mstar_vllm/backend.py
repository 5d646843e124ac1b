"""The backend classes: the one for this machine's platform, under the name it is registered by."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

__all__ = ["MStarBackend", "backend_class"]


def backend_class(kernels: str | None) -> Any:
    """The class for the `kernels` setting, which only CUDA gives a choice of.

    Raises NotImplementedError on a platform without kernels.
    """
    if current_platform.is_cpu():
        from mstar_vllm.backend_cpu import MStarCPUBackend

        return MStarCPUBackend
    if not current_platform.is_cuda():
        raise NotImplementedError(
            f"mstar has no kernels for {current_platform.device_name}; it supports CPU and CUDA"
        )
    if kernels == "flashinfer":
        from mstar_vllm.backend_flashinfer import MStarFlashInferBackend

        return MStarFlashInferBackend
    from mstar_vllm.backend_flash_attn import MStarFlashAttentionBackend

    return MStarFlashAttentionBackend


MStarBackend = backend_class(None)
