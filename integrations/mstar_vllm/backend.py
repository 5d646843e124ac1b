"""The backend class under the name it is registered by: the variant for this machine's platform."""

from __future__ import annotations

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from mstar_vllm.backend_cpu import MStarCPUBackend as MStarBackend
else:
    raise NotImplementedError(
        f"mstar has no kernels for {current_platform.device_name}; it supports CPU and CUDA"
    )

__all__ = ["MStarBackend"]
