"""Steps, contexts and admission outcomes."""

from __future__ import annotations

import dataclasses

import pytest

from mstar_plugin.kv.config import KVStep, RetentionPolicy
from mstar_plugin.step import (
    ADMIT_OK,
    AdmitFailedReason,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    RequestOffloading,
    ResourceStep,
    Segment,
    StepContext,
    SubmoduleStep,
)

SEGMENTS = (Segment("a", "main", 4), Segment("b", "main", 0))


def test_a_segment_is_a_tuple_of_request_label_and_span() -> None:
    assert tuple(Segment("a", "main", 4)) == ("a", "main", 4)


def test_a_step_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ResourceStep(SEGMENTS).segments = ()  # type: ignore[misc]


def test_steps_without_segments_take_those_of_the_submodule() -> None:
    retention = {("a", "main"): RetentionPolicy(8)}
    bare, own = KVStep(commit=False, retention=retention), KVStep(SEGMENTS[:1])
    submodule = SubmoduleStep({"kv": bare, "cross": own}, list(SEGMENTS))  # type: ignore[arg-type]
    filled = submodule.steps["kv"]
    assert isinstance(filled, KVStep)
    assert filled.segments == SEGMENTS
    assert (filled.commit, filled.retention) == (False, retention)
    assert submodule.steps["cross"] is own
    assert bare.segments is None


def test_a_submodule_without_segments_leaves_its_steps_alone() -> None:
    steps = {"kv": KVStep()}
    assert SubmoduleStep(steps).steps is steps


def test_an_unpadded_context_pads_with_nothing() -> None:
    assert StepContext(request_ids=["a"]).padded_request_ids == ["a"]
    padded = StepContext(request_ids=["a"], padded_request_ids=["a", "pad0"])
    assert (padded.request_ids, padded.padded_request_ids) == (["a"], ["a", "pad0"])


def test_contexts_do_not_share_their_results() -> None:
    first = StepContext(request_ids=[])
    first.plan_results["kv"] = 1
    assert StepContext(request_ids=[]).plan_results == {}


def test_reasons_say_what_failed_and_what_to_do() -> None:
    short = AllocationFailed(3, "main", "r1")
    assert (short.pages_short, short.label, short.request_id) == (3, "main", "r1")
    for part in ("'main'", "'r1'", "3 pages short", "retry"):
        assert part in short.message
    away = RequestOffloading("uncond", "r2")
    assert (away.label, away.request_id) == ("uncond", "r2")
    assert "'uncond'" in away.message and "reload" in away.message
    assert AdmitRuntimeError("no").message == "no"


def test_only_the_class_of_a_reason_tells_retry_from_failure() -> None:
    reasons = [AllocationFailed(1, "m", "r"), RequestOffloading("m", "r"), AdmitRuntimeError("x")]
    assert all(isinstance(reason, AdmitFailedReason) for reason in reasons)
    assert len({type(reason) for reason in reasons}) == 3


def test_an_outcome_defaults_to_ready() -> None:
    assert AdmitOutcome(ok=True) == ADMIT_OK == (True, True, None)
    refused = AdmitOutcome(False, False, AdmitRuntimeError("x"))
    assert not refused.ok and refused.reason == AdmitRuntimeError("x")
