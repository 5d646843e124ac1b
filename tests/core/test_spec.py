"""What every resource and its declaration have in common."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_plugin.spec import NodeResourceSpec, Resource
from mstar_plugin.step import ADMIT_OK, AdmitOutcome, ResourceStep, StepContext


class Counter(Resource):
    """The smallest resource: counts the steps of each request."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    @classmethod
    def build(cls, spec: NodeResourceSpec, **engine_kwargs: Any) -> Counter:
        return cls()

    def ingest_request(self, request_id: str, overrides: Any = None) -> None:
        self.steps.setdefault(request_id, 0)

    def remove_request(self, request_id: str) -> None:
        self.steps.pop(request_id, None)

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        return ADMIT_OK

    def plan(self, step: ResourceStep, ctx: StepContext) -> Any:
        return dict(self.steps)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        for request_id in ctx.request_ids:
            self.steps[request_id] += 1

    def reset_request(self, request_id: str, free: bool = False) -> None:
        self.steps[request_id] = 0


class CounterSpec(NodeResourceSpec):
    @property
    def resource_class(self) -> type[Resource]:
        return Counter

    def apply_yaml_overrides(self) -> None:  # type: ignore[override]
        return None


def test_a_declared_resource_lives_through_a_step() -> None:
    spec = CounterSpec("count", ["n"])  # type: ignore[arg-type]
    counter = spec.resource_class.build(spec)
    counter.ingest_request("a")
    ctx = StepContext(request_ids=["a"])
    assert counter.admit(ResourceStep(), ctx).ok
    assert counter.plan(ResourceStep(), ctx) == {"a": 0}
    counter.commit(ResourceStep(), ctx)
    assert counter.plan(ResourceStep(), ctx) == {"a": 1}
    assert not counter.supports_preplan


def test_a_resource_and_a_spec_must_say_what_they_do() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Resource()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        NodeResourceSpec("kv", {"n"})  # type: ignore[abstract]


def test_a_typo_in_an_override_is_loud() -> None:
    with pytest.raises(TypeError, match="page_sise"):
        CounterSpec("count", {"n"}).apply_yaml_overrides(page_sise=3)  # type: ignore[call-arg]
