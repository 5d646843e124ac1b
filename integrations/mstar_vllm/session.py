"""The plan of the model being built in this process.

vLLM gives `customize_spec` neither a configuration nor a layer, so the implementation's
constructor, where the configuration can still be read, leaves the plan here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from mstar_vllm.serving import ServingPlan, in_flight_tokens, serving_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Session:
    """The plan and the tokens that can be in flight per request."""

    plan: ServingPlan
    in_flight_tokens: int


_current: tuple[ReferenceType[VllmConfig], Session] | None = None


def activate(vllm_config: VllmConfig) -> Session:
    """Make `vllm_config`'s plan the current one; repeated calls for it are free."""
    global _current
    if _current is None or _current[0]() is not vllm_config:
        session = Session(serving_plan(vllm_config), in_flight_tokens(vllm_config))
        _current = (ref(vllm_config), session)
    return _current[1]


def current() -> Session | None:
    """The plan of the model built last, None before the first."""
    return None if _current is None else _current[1]
