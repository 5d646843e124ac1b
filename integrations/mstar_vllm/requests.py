"""Front end: a request's own policy is checked, made plain numbers, and kept apart in the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import compat
from mstar_vllm.plugin import is_selected
from mstar_vllm.policy import (
    BUDGET_KEY,
    PREFIX_KEY,
    PolicyError,
    check_keys,
    first_key,
    has_policy,
    own_policy,
    policy_arguments,
)
from mstar_vllm.serving import ServingPlan, serving_plan


def hook_input_processor() -> None:
    """Check requests where they enter: offline and over HTTP alike."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.engine.input_processor import InputProcessor

    compat.wrap_method(InputProcessor, "process_inputs", _process_inputs)
    for request_class in (ChatCompletionRequest, CompletionRequest):
        compat.wrap_method(request_class, "to_beam_search_params", _to_beam_search_params)


def bind_policy(request: Any, plan: ServingPlan, max_model_len: int) -> None:
    """Check the policy that an `EngineCoreRequest` brings and write it back as numbers.

    Its prefix-cache salt then names the policy, because keys and values behind the first release
    depend on it. Raises PolicyError.
    """
    params = request.sampling_params
    if params is None:
        return
    check_keys(params.extra_args)
    if not has_policy(params.extra_args):
        return
    if plan.obstacle is not None:
        raise PolicyError(
            first_key(params.extra_args), f"this server cannot bound requests: {plan.obstacle}"
        )
    policy = own_policy(params.extra_args, plan.retention, _prompt_length(request))
    _check_fits(policy, max_model_len)
    params.extra_args = {**params.extra_args, **policy_arguments(policy)}
    request.cache_salt = _salt(request.cache_salt, policy)


def check_frames(request: Any, plan: ServingPlan) -> None:
    """Refuse a prompt that ends inside a frame: every later frame would be out of step with the
    client's. Raises PolicyError.
    """
    if plan.ring is None:
        return
    size, length = plan.ring.tokens_per_frame, _prompt_length(request)
    if length % size:
        raise PolicyError(
            "prompt",
            f"prompt must be whole frames of {size} tokens, got {length} tokens; complete its last "
            "frame or leave it out",
        )


def _process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = original(processor, *args, **kwargs)
    plan = _plan_of(processor)
    if plan is not None:
        try:
            check_frames(request, plan)
            bind_policy(request, plan, processor.model_config.max_model_len)
        except PolicyError as error:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(str(error), parameter=error.parameter) from None
    return request


def _to_beam_search_params(
    original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Beams are requests of their own, to which vLLM does not pass `vllm_xargs` on."""
    if has_policy(request.vllm_xargs):
        from vllm.exceptions import VLLMValidationError

        key = first_key(request.vllm_xargs)
        raise VLLMValidationError(
            f"{key} cannot be used with beam search; leave out one of the two", parameter=key
        )
    return original(request, *args, **kwargs)


def _plan_of(processor: Any) -> ServingPlan | None:
    kept: dict[str, ServingPlan | None] = vars(processor)
    if "_mstar_plan" not in kept:
        config = processor.vllm_config
        kept["_mstar_plan"] = serving_plan(config) if is_selected(config) else None
    return kept["_mstar_plan"]


def _prompt_length(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)


def _check_fits(policy: RetentionPolicy, max_model_len: int) -> None:
    total = policy.context_budget + policy.protected_prefix
    if total > max_model_len:
        raise PolicyError(
            BUDGET_KEY,
            f"{BUDGET_KEY} + {PREFIX_KEY} must not exceed max_model_len {max_model_len}, "
            f"got {total}",
        )


def _salt(salt: str | None, policy: RetentionPolicy) -> str:
    named = ":".join(str(value) for value in policy_arguments(policy).values())
    return f"{salt or ''}|mstar:{named}"
