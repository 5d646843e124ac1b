"""The plan of the model being built in this process.

vLLM gives `customize_spec` neither a configuration nor a layer, so the implementation's
constructor, where the configuration can still be read, leaves the plan here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from mstar_vllm.copy_ledger import BlockWrites
from mstar_vllm.positions import ROLLING, positions_of
from mstar_vllm.serving import ServingPlan, in_flight_tokens, serving_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Session:
    """The plan, the tokens that can be in flight per request, and what this process has written to
    its pool.
    """

    plan: ServingPlan
    in_flight_tokens: int
    writes: BlockWrites = field(default_factory=BlockWrites)

    @property
    def rolls(self) -> bool:
        return positions_of(self.plan.retention) == ROLLING


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
