"""Tells the client what retention dropped: a note on the finished request's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mstar_vllm import compat

NOTE_KEY = "mstar"


def hook_scheduler() -> None:
    """Add the note where a KV connector would add its parameters."""
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_method(Scheduler, "_connector_finished", _connector_finished)


def _connector_finished(
    original: Callable[..., tuple[bool, dict[str, Any] | None]], scheduler: Any, request: Any
) -> tuple[bool, dict[str, Any] | None]:
    delay, parameters = original(scheduler, request)
    note = released_note(scheduler.kv_cache_manager.coordinator.single_type_managers, request)
    if note is not None:
        parameters = {**(parameters or {}), NOTE_KEY: note}
    return delay, parameters


def released_note(managers: Any, request: Any) -> dict[str, int] | None:
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
                    "released_tokens": released,
                }
    return None
