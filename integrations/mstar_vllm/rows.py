"""Which policy holds for each row of the batch being built, where requests bring policies of their
own.

vLLM's builders see rows without their requests. The model runner's hooks keep the policies of live
requests and publish them, row by row, while the metadata of a batch is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.policy import bound_policy, has_policy

RowPolicies = Sequence[RetentionPolicy | None]
_published: RowPolicies | None = None


def published() -> RowPolicies | None:
    """Own policies of the rows of the current batch, None for the server's; None where no row has
    one.
    """
    return _published


def hook_model_runner() -> None:
    """Hook the first-generation model runner, which the CPU platform uses."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mstar_vllm import compat
    from mstar_vllm.worker_start import hook_worker_start

    hook_worker_start(GPUModelRunner)
    compat.wrap_method(GPUModelRunner, "_update_states", _update_states)
    compat.wrap_method(GPUModelRunner, "_build_attention_metadata", _build_attention_metadata)


def _own_policies(runner: Any) -> dict[str, RetentionPolicy]:
    policies: dict[str, RetentionPolicy] = vars(runner).setdefault("_mstar_own_policies", {})
    return policies


def _update_states(original: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    policies = _own_policies(runner)
    for request_id in scheduler_output.finished_req_ids:
        policies.pop(request_id, None)
    for request in scheduler_output.scheduled_new_reqs:
        params = request.sampling_params
        if params is not None and has_policy(params.extra_args):
            policies[request.req_id] = bound_policy(params.extra_args)
    return original(runner, scheduler_output)


def _build_attention_metadata(
    original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    policies = _own_policies(runner)
    if not policies:
        return original(runner, *args, **kwargs)
    global _published
    _published = [policies.get(request_id) for request_id in runner.input_batch.req_ids]
    try:
        return original(runner, *args, **kwargs)
    finally:
        _published = None
