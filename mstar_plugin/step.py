"""What an engine asks of its resources in one forward pass, and how admission answers. Integers
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """One step's addition to one stream.

    A request brings one segment per label that is active in the step, and the order of the segments
    is the order of the packed tokens. `span` counts tokens; 0 reads the stream without extending
    it.
    """

    request_id: str
    label: str
    span: int


@dataclass(frozen=True)
class ResourceStep:
    """The work of one resource in one step; `segments=None` takes those of the enclosing
    `SubmoduleStep`.
    """

    segments: tuple[Segment, ...] | None = None

    def __post_init__(self) -> None:
        if self.segments is not None and type(self.segments) is not tuple:
            object.__setattr__(self, "segments", tuple(self.segments))


@dataclass(frozen=True)
class SubmoduleStep:
    """The steps of every resource a sub-module's forward touches, by resource key.

    `segments` is the default of each step that names none; the given steps are copied, not changed.
    """

    steps: Mapping[str, ResourceStep]
    segments: tuple[Segment, ...] | None = None

    def __post_init__(self) -> None:
        if self.segments is None:
            return
        segments = tuple(self.segments)
        filled = {
            key: step if step.segments is not None else replace(step, segments=segments)
            for key, step in self.steps.items()
        }
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "steps", filled)


@dataclass(kw_only=True)
class StepContext:
    """What the engine knows about a step and the model's declaration does not.

    `request_ids` are the real requests in batch order; `padded_request_ids` appends the dummy ids
    that fill a captured graph's batch, and equals `request_ids` when none is given. `slot` picks
    the buffer set of a captured graph, `capture` says that the step only records one. `is_preplan`
    marks a step that is planned while the previous one still runs. `plan_results` collects what
    each resource's `plan` returned, by key.
    """

    request_ids: Sequence[str]
    node: str | None = None
    graph_walk: str | None = None
    slot: int = 0
    capture: bool = False
    is_preplan: bool = False
    plan_results: dict[str, Any] = field(default_factory=dict)
    padded_request_ids: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.padded_request_ids:
            self.padded_request_ids = self.request_ids


@dataclass(frozen=True)
class AdmitFailedReason:
    """Why a step was not admitted; its class tells the caller what to do."""

    message: str


@dataclass(frozen=True, init=False)
class AllocationFailed(AdmitFailedReason):
    """The pool lacks `pages_short` pages: free pages of another request, then admit the same step
    again.
    """

    pages_short: int
    label: str
    request_id: str

    def __init__(self, pages_short: int, label: str, request_id: str) -> None:
        message = (
            f"label {label!r} of request {request_id!r} is {pages_short} pages short: "
            "evict or offload another request and retry"
        )
        _set_fields(
            self, message=message, pages_short=pages_short, label=label, request_id=request_id
        )


@dataclass(frozen=True, init=False)
class RequestOffloading(AdmitFailedReason):
    """The request's pages are in host memory or on their way: reload it, then admit the same step
    again.
    """

    label: str
    request_id: str

    def __init__(self, label: str, request_id: str) -> None:
        message = (
            f"label {label!r} of request {request_id!r} is offloaded: reload the request and retry"
        )
        _set_fields(self, message=message, label=label, request_id=request_id)


@dataclass(frozen=True)
class AdmitRuntimeError(AdmitFailedReason):
    """The step can never be admitted: fail the request."""


class AdmitOutcome(NamedTuple):
    """The answer to `admit`: `ok` is whether the step may run, `reason` why not.

    `ready` is False while the state the step reads is not on the device, and on every refusal.
    """

    ok: bool
    ready: bool = True
    reason: AdmitFailedReason | None = None


ADMIT_OK = AdmitOutcome(ok=True)


def _set_fields(target: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)
