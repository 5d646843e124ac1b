"""The life of a step: admitted, planned, perhaps ahead of time, and committed or undone."""

from __future__ import annotations

import torch

from mstar_plugin.kv import admission, lifecycle
from mstar_plugin.kv.config import KVStep
from mstar_plugin.kv.flight import Flight, resolve
from mstar_plugin.kv.forks import apply_forks, pending_forks
from mstar_plugin.kv.forward import ForwardCursor
from mstar_plugin.kv.plan import KVPlanOutputs, PinnedIndexRing
from mstar_plugin.kv.planner import PendingFork, plan_label
from mstar_plugin.kv.sharing import start_chain
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.streams import IN_FLIGHT, STAGED
from mstar_plugin.step import (
    ADMIT_OK,
    AdmitFailedReason,
    AdmitOutcome,
    AdmitRuntimeError,
    ResourceStep,
    StepContext,
)


class StepLane:
    """Steps in flight over one `KVState`, whose lock the caller holds."""

    def __init__(self, state: KVState, forward: ForwardCursor) -> None:
        self._state = state
        self._forward = forward
        self._last: Flight | None = None
        on_cuda = state.cache.data.device.type == "cuda"
        self._ring = PinnedIndexRing() if on_cuda else None

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        step, state = _kv_step(step), self._state
        if state.staged is not None:
            if state.staged.is_for(step, ctx):
                return ADMIT_OK if ctx.is_preplan else self._promote(state.staged)
            self.clear_ahead()
        if not ctx.is_preplan and self._find(step, ctx) is not None:
            return ADMIT_OK
        try:
            flight = resolve(step, ctx, state.table, self._last)
        except (KeyError, ValueError) as error:
            return _refused(AdmitRuntimeError(str(error.args[0])))
        return self._take_off(flight, ctx)

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        flight = self._flight(step, ctx)
        admission.undo(self._state, flight)
        if flight is self._state.staged:
            self._state.staged = None
        lifecycle.finish(self._state, flight)
        self._forward.end(flight)

    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlanOutputs:
        flight, state = self._flight(step, ctx), self._state
        if flight is state.staged:
            flight.planned_ahead = True
            return self._plan(flight, pending_forks(flight.pre_forks, state))
        if not flight.forked:
            apply_forks(flight.pre_forks, state)
            flight.forked = True
        outputs = flight.outputs
        if outputs is None or not flight.planned_ahead:
            outputs = self._plan(flight, {})
        flight.planned_ahead = False
        self._forward.begin(flight)
        return outputs

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        flight = self._flight(step, ctx)
        if flight.step.commit:
            lifecycle.keep(self._state, flight, ctx)
        lifecycle.finish(self._state, flight)
        self._forward.end(flight)

    def clear_ahead(self) -> None:
        staged, self._state.staged = self._state.staged, None
        if staged is not None:
            lifecycle.finish_ahead(self._state, staged)

    def _take_off(self, flight: Flight, ctx: StepContext) -> AdmitOutcome:
        state = self._state
        self._refuse_early_preplan(flight, ctx)
        for stream in flight.opened:
            start_chain(state, stream)
        reason = admission.reserve(state, flight)
        if reason is not None:
            return _refused(reason)
        self._last = flight
        state.table.mark(flight.touched_rows(), STAGED if ctx.is_preplan else IN_FLIGHT)
        if ctx.is_preplan:
            state.staged = flight
        else:
            state.flights.append(flight)
        return ADMIT_OK

    def _promote(self, staged: Flight) -> AdmitOutcome:
        state, rows = self._state, staged.touched_rows()
        state.staged = None
        state.flights.append(staged)
        state.table.unmark(rows, STAGED)
        state.table.mark(rows, IN_FLIGHT)
        return ADMIT_OK

    def _plan(self, flight: Flight, pending: dict[int, PendingFork]) -> KVPlanOutputs:
        step, state = flight.step, self._state
        if self._ring is not None:
            self._ring.begin_plan()
        outputs = KVPlanOutputs(pre_forks=step.pre_forks, post_forks=step.post_forks)
        for label in flight.groups:
            outputs[label], rows = plan_label(
                flight, label, state.table, state.config.page_size, pending, self._ring
            )
            flight.writes[label] = torch.from_numpy(rows)
        flight.outputs = outputs
        return outputs

    def _find(self, step: KVStep, ctx: StepContext) -> Flight | None:
        return next((flight for flight in self._state.flights if flight.is_for(step, ctx)), None)

    def _flight(self, step: ResourceStep, ctx: StepContext) -> Flight:
        flight = self._state.staged if ctx.is_preplan else self._find(_kv_step(step), ctx)
        if flight is None or not flight.is_for(_kv_step(step), ctx):
            raise RuntimeError("a step must be admitted before it is planned, committed or undone")
        return flight

    def _refuse_early_preplan(self, flight: Flight, ctx: StepContext) -> None:
        table = self._state.table
        if ctx.is_preplan and (table.flags[flight.touched_rows()] & IN_FLIGHT).any():
            admission.close_opened(self._state, flight)
            raise RuntimeError(
                "a step can be admitted ahead of time once the step before it is committed, "
                "one of its streams has a step in flight"
            )


def _kv_step(step: ResourceStep) -> KVStep:
    if not isinstance(step, KVStep):
        raise TypeError(f"a paged KV resource takes a KVStep, got {type(step).__name__}")
    return step


def _refused(reason: AdmitFailedReason) -> AdmitOutcome:
    return AdmitOutcome(ok=False, ready=False, reason=reason)
