"""Checks in the front end, before anything is spawned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_vllm import compat
from mstar_vllm.ring_plan import adopt_frame_as_block
from mstar_vllm.serving import serving_plan
from mstar_vllm.settings import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_MULTIPLE = 16


def check_configuration(vllm_config: VllmConfig) -> None:
    """Refuse by name what cannot be served; called again for copies, where it changes nothing."""
    compat.check_engine_version(compat.engine_version())
    if vllm_config.model_config is None:
        return
    _check_block_size(vllm_config)
    _check_kernels(vllm_config)
    plan = serving_plan(vllm_config)
    if plan.ring is not None:
        adopt_frame_as_block(vllm_config, plan.ring)
    from mstar_vllm.front_end import hook_front_end

    hook_front_end()


def _check_block_size(vllm_config: VllmConfig) -> None:
    cache = vllm_config.cache_config
    if cache.user_specified_block_size and cache.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"--block-size must be a multiple of {BLOCK_MULTIPLE} with mstar, "
            f"got {cache.block_size}"
        )


def _check_kernels(vllm_config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    kernels = settings_of(vllm_config).kernels
    if kernels is not None and current_platform.is_cpu():
        raise ValueError(
            "additional_config['mstar']['kernels'] must be left out on CPU, which has kernels of "
            f"its own, got {kernels!r}"
        )
