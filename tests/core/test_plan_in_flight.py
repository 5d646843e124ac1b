"""A plan waits until the card has copied the last one, seen through an event that says when."""

from __future__ import annotations

import weakref

import pytest
import torch

from mstar_plugin.attention.plan_in_flight import PlanInFlight


class Owner:
    pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the card, in order; without one, a card that answers at once."""
    told: list[str] = []

    class Event:
        def synchronize(self) -> None:
            told.append("wait")

        def record(self, stream: str) -> None:
            told.append(f"record on {stream}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "capture" in told)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s")
    return told


def test_a_plan_waits_for_the_copies_of_the_one_before(told: list[str]) -> None:
    plan = PlanInFlight(torch.device("cuda:1"))
    for name in ("first", "second"):
        with plan.replaced_by(None):
            told.append(name)
    recorded = "record on cuda:1's"
    assert told == ["wait", "first", recorded, "wait", "second", recorded]


def test_an_owner_lives_until_the_next_plan(told: list[str]) -> None:
    plan, owner = PlanInFlight(torch.device("cuda")), Owner()
    seen = weakref.ref(owner)
    with plan.replaced_by(owner):
        pass
    del owner
    assert seen() is not None
    with plan.replaced_by(None):
        assert seen() is not None
    assert seen() is None


def test_a_plan_that_fails_is_waited_for_too(told: list[str]) -> None:
    plan = PlanInFlight(torch.device("cuda"))
    with pytest.raises(ValueError, match="no such batch"), plan.replaced_by(None):
        raise ValueError("no such batch")
    assert told[-1].startswith("record")


def test_planning_within_a_capture_is_refused(told: list[str]) -> None:
    told.append("capture")
    with (
        pytest.raises(RuntimeError, match="before a graph is captured"),
        PlanInFlight(torch.device("cuda")).replaced_by(None),
    ):
        told.append("planned")
    assert told == ["capture"]
