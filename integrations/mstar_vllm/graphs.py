"""Which CUDA graphs a step may replay where only requests bring policies.

Such a server captures its full graphs over the runner's own tables, so that unbounded steps cost
nothing more than stock. A step with a bounded request reads other tables: it takes the piecewise
graphs. A server with a policy of its own captures over the transform's tables and always replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mstar_vllm import compat, rows_v2, session

_leaves_out_full = False


def hook_second_runner() -> None:
    """Remove when a builder can refuse a full graph for the batch at hand."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    compat.wrap_method(CudaGraphManager, "dispatch", _dispatch_second)


def hook_first_runner() -> None:
    """Remove when a builder can refuse a full graph for the batch at hand."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    compat.wrap_method(GPUModelRunner, "_determine_batch_execution_and_padding", _determine)
    compat.wrap_method(CudagraphDispatcher, "dispatch", _dispatch_first)


def _only_requests_are_bounded() -> bool:
    active = session.current()
    return active is not None and active.plan.retention is None


def _dispatch_second(
    original: Callable[..., Any],
    manager: Any,
    num_reqs: int,
    num_tokens: int,
    uniform_token_count: int | None,
    num_active_loras: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    chosen = original(
        manager, num_reqs, num_tokens, uniform_token_count, num_active_loras, *args, **kwargs
    )
    if not _is_full(chosen) or not rows_v2.any_live() or not _only_requests_are_bounded():
        return chosen
    # No full decode graph matches a batch that is not uniform.
    chosen = original(manager, num_reqs, num_tokens, None, num_active_loras)
    return _eager(num_reqs, num_tokens, num_active_loras) if _is_full(chosen) else chosen


def _is_full(batch_desc: Any) -> bool:
    from vllm.config.compilation import CUDAGraphMode

    return bool(batch_desc.cg_mode is CUDAGraphMode.FULL)


def _eager(num_reqs: int, num_tokens: int, num_active_loras: int) -> Any:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.NONE,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        num_active_loras=num_active_loras,
    )


def _determine(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    global _leaves_out_full
    _leaves_out_full = (
        bool(vars(runner).get("_mstar_own_policies")) and _only_requests_are_bounded()
    )
    try:
        return original(runner, *args, **kwargs)
    finally:
        _leaves_out_full = False


def _dispatch_first(
    original: Callable[..., Any], dispatcher: Any, *args: Any, **kwargs: Any
) -> Any:
    if _leaves_out_full:
        from vllm.config.compilation import CUDAGraphMode

        kwargs["invalid_modes"] = {CUDAGraphMode.FULL, *(kwargs.get("invalid_modes") or ())}
    return original(dispatcher, *args, **kwargs)
