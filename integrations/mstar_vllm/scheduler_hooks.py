"""What the managers learn from the scheduler, and what a finished request's output says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mstar_vllm import compat
from mstar_vllm.positions import positions_of

NOTE_KEY = "mstar"


def hook_scheduler() -> None:
    """Show requests to the managers as they arrive; add the note where a KV connector would add its
    parameters.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_method(Scheduler, "add_request", _add_request)
    compat.wrap_method(Scheduler, "_connector_finished", _connector_finished)


def _add_request(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from mstar_vllm.cache_managers import RetentionManager

    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, RetentionManager):
            manager.learn(request)
    return original(scheduler, request)


def _connector_finished(
    original: Callable[..., tuple[bool, dict[str, Any] | None]], scheduler: Any, request: Any
) -> tuple[bool, dict[str, Any] | None]:
    delay, parameters = original(scheduler, request)
    note = released_note(scheduler.kv_cache_manager.coordinator.single_type_managers, request)
    if note is not None:
        parameters = {**(parameters or {}), NOTE_KEY: note}
    return delay, parameters


def released_note(managers: Any, request: Any) -> dict[str, int | str] | None:
    """The policy and the tokens that the request no longer sees; None where it sees everything."""
    from mstar_vllm.cache_managers import RetentionManager

    for manager in managers:
        if isinstance(manager, RetentionManager):
            policy = manager.policy_of(request.request_id)
            released = manager.released_tokens(request.request_id)
            if policy is not None and released:
                return {
                    "context_budget": policy.context_budget,
                    "protected_prefix": policy.protected_prefix,
                    "positions": positions_of(policy),
                    "released_tokens": released,
                }
    return None
