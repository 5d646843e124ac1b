"""What a resource is to an engine: how a model declares it, what a request says about it, its life
cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from mstar_plugin.step import AdmitOutcome, ResourceStep, StepContext


@dataclass
class NodeResourceSpec(ABC):
    """One resource of a model: its key, the sub-modules (nodes) that share it, what builds it."""

    resource_key: str
    nodes: set[str]

    def __post_init__(self) -> None:
        if isinstance(self.nodes, str):
            raise ValueError(
                f"nodes of resource {self.resource_key!r} must be a collection of names, "
                f"got the string {self.nodes!r}: wrap it in a set"
            )
        self.nodes = set(self.nodes)

    @property
    @abstractmethod
    def resource_class(self) -> type[Resource]:
        """The class whose `build` constructs the resource, imported on first use."""

    @abstractmethod
    def apply_yaml_overrides(self, **kwargs: Any) -> None:
        """Set the deployment's values in place; `TypeError` for a key that is not known."""


@dataclass
class ResourceReqConfig:
    """What one request declares for one resource; as it stands, one that no request changes."""

    def apply_conductor_config(self, **kwargs: Any) -> None:
        """Take the values meant for this resource; the call serves several, others are ignored."""
        return None

    def validate(self, spec: Any = None) -> None:
        """`ValueError` (the client's fault, a 400) when the request cannot fit the resource."""
        return None

    def loop_room(self, spec: Any = None) -> dict[str, int]:
        """Loop name -> most iterations that fit the resource; loops it does not bound left out."""
        return {}


class Resource(ABC):
    """State that outlives a step.

    Life of a request: `ingest_request`, then `admit`, `plan`, `commit` for each step, then
    `remove_request`.
    """

    @classmethod
    @abstractmethod
    def build(cls, spec: NodeResourceSpec, **engine_kwargs: Any) -> Resource:
        """Construct the resource `spec` declares; `TypeError` when the spec is of another kind."""

    @abstractmethod
    def ingest_request(self, request_id: str, overrides: ResourceReqConfig | None = None) -> None:
        """Make the request known; a second call with the same id changes nothing."""

    @abstractmethod
    def remove_request(self, request_id: str) -> None:
        """Free everything the request holds; an unknown id changes nothing."""

    @abstractmethod
    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Reserve what `step` needs, all or nothing."""

    @abstractmethod
    def plan(self, step: ResourceStep, ctx: StepContext) -> Any:
        """What dependents read about an admitted step; goes to `ctx.plan_results`."""

    @abstractmethod
    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Keep what the step's forward wrote."""

    @abstractmethod
    def reset_request(self, request_id: str, free: bool = False) -> None:
        """Forget the request's state but keep it known; `free` also gives its storage back."""

    @property
    def supports_preplan(self) -> bool:
        """Whether a step may be planned while the previous one still runs."""
        return False
