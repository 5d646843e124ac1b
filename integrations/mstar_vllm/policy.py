"""A request's own retention policy: one pure function that the front end, the scheduler and the
worker share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.positions import ABSOLUTE, POSITIONS, ROLLING, policy_with, positions_of
from mstar_vllm.settings import shown, token_count

BUDGET_KEY = "mstar_context_budget"
PREFIX_KEY = "mstar_protected_prefix"
POSITIONS_KEY = "mstar_positions"
PROMPT = "prompt"
_KEYS = (BUDGET_KEY, PREFIX_KEY, POSITIONS_KEY)


class PolicyError(ValueError):
    """A request's policy is wrong; `parameter` names the field."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def has_policy(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request brings a policy of its own."""
    return extra_args is not None and any(key in extra_args for key in _KEYS)


def request_policy(
    extra_args: Mapping[str, Any] | None,
    server: RetentionPolicy | None,
    num_prompt_tokens: int,
) -> RetentionPolicy | None:
    """The policy that holds for a request: its own where it brings one, else the server's.

    `extra_args` are the sampling parameters' (HTTP: `vllm_xargs`). Raises PolicyError as
    `own_policy` does.
    """
    if extra_args is None or not has_policy(extra_args):
        return server
    return own_policy(extra_args, server, num_prompt_tokens)


def own_policy(
    extra_args: Mapping[str, Any], server: RetentionPolicy | None, num_prompt_tokens: int
) -> RetentionPolicy:
    """The policy that a request brings.

    A missing protected prefix is the server's, cut to fit; a missing budget is what the server's
    total leaves behind the prefix; missing positions are the server's, or absolute where the
    request protects more than the server has made room to roll. The value "prompt" protects
    `num_prompt_tokens` tokens. Raises PolicyError where the values are wrong or ask for more than
    the server's total.
    """
    prefix = _prefix(extra_args.get(PREFIX_KEY), server, num_prompt_tokens)
    budget = _budget(extra_args.get(BUDGET_KEY), server, prefix)
    positions = _positions(extra_args.get(POSITIONS_KEY), server, prefix)
    _check_total(budget, prefix, server)
    if positions == ROLLING:
        _check_rolling(prefix, server)
    return policy_with(budget, prefix, positions)


def bound_policy(extra_args: Mapping[str, Any]) -> RetentionPolicy:
    """The policy of a request that `policy_arguments` has written, whatever the server's."""
    return policy_with(
        extra_args[BUDGET_KEY], extra_args[PREFIX_KEY], extra_args.get(POSITIONS_KEY, ABSOLUTE)
    )


def policy_arguments(policy: RetentionPolicy) -> dict[str, Any]:
    """The keys that say `policy` in full."""
    return {
        BUDGET_KEY: policy.context_budget,
        PREFIX_KEY: policy.protected_prefix,
        POSITIONS_KEY: positions_of(policy),
    }


def first_key(extra_args: Mapping[str, Any]) -> str:
    """The key to name where a request cannot bring a policy at all."""
    return next(key for key in _KEYS if key in extra_args)


def check_keys(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse keys that look like this plugin's and are not: a typing error must not be dropped."""
    for key in extra_args or ():
        if key.startswith("mstar_") and key not in _KEYS:
            raise PolicyError(key, f"{key} is not known; known are {', '.join(_KEYS)}")


def _prefix(value: Any, server: RetentionPolicy | None, num_prompt_tokens: int) -> int:
    if value is None:
        return server.protected_prefix if server else 0
    if value == PROMPT:
        return num_prompt_tokens
    try:
        return token_count(PREFIX_KEY, value, 0)
    except ValueError as error:
        hint = '; "prompt" protects the whole prompt' if isinstance(value, str) else ""
        raise PolicyError(PREFIX_KEY, f"{error}{hint}") from None


def _budget(value: Any, server: RetentionPolicy | None, prefix: int) -> int:
    if value is not None:
        try:
            return token_count(BUDGET_KEY, value, 1)
        except ValueError as error:
            raise PolicyError(BUDGET_KEY, str(error)) from None
    if server is None:
        raise PolicyError(BUDGET_KEY, f"{BUDGET_KEY} is needed where the server sets no policy")
    left = server.context_budget + server.protected_prefix - prefix
    if left < 1:
        raise PolicyError(
            PREFIX_KEY,
            f"{PREFIX_KEY} must leave room for a budget within the server's total of "
            f"{server.context_budget + server.protected_prefix} tokens, got {prefix}",
        )
    return left


def _positions(value: Any, server: RetentionPolicy | None, prefix: int) -> str:
    if value is None:
        fits = server is not None and prefix <= server.protected_prefix
        return positions_of(server) if fits else ABSOLUTE
    if value not in POSITIONS:
        raise PolicyError(
            POSITIONS_KEY,
            f"{POSITIONS_KEY} must be one of {', '.join(POSITIONS)}, got {shown(value)}",
        )
    return str(value)


def _check_rolling(prefix: int, server: RetentionPolicy | None) -> None:
    """Protected pages seen at another distance take room, which the server made for its prefix."""
    if server is None or positions_of(server) != ROLLING:
        raise PolicyError(
            POSITIONS_KEY,
            f"{POSITIONS_KEY} can be {ROLLING!r} only where the server protects a prefix and its "
            f"start-up report says {ROLLING!r}; leave it out",
        )
    if prefix > server.protected_prefix:
        raise PolicyError(
            PREFIX_KEY,
            f"{PREFIX_KEY} must not exceed the server's {server.protected_prefix} with rolling "
            f"positions, got {prefix}; lower it or send {POSITIONS_KEY} {ABSOLUTE!r}",
        )


def _check_total(budget: int, prefix: int, server: RetentionPolicy | None) -> None:
    if server is None:
        return
    total = server.context_budget + server.protected_prefix
    if budget + prefix > total:
        raise PolicyError(
            BUDGET_KEY,
            f"{BUDGET_KEY} + {PREFIX_KEY} must not exceed the server's "
            f"{server.context_budget} + {server.protected_prefix}, got {budget} + {prefix}",
        )
