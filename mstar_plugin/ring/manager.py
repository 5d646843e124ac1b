"""The ring resource: sessions over the layers' rings, admitted, planned and committed by frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mstar_plugin.kv.config import KVSpec, RingKVConfig, RingKVStep
from mstar_plugin.ring.cache import SPARSE_BLOCK_TOKENS, LayerRingCache, RingLayerState
from mstar_plugin.ring.memory import RingMemory, ring_memory
from mstar_plugin.ring.plan import RingPlan, RingRow, RowBuffers
from mstar_plugin.ring.sessions import SessionTable
from mstar_plugin.spec import NodeResourceSpec, Resource, ResourceReqConfig
from mstar_plugin.step import (
    ADMIT_OK,
    AdmitOutcome,
    AdmitRuntimeError,
    ResourceStep,
    StepContext,
)


class RingKVManager(Resource):
    """A fixed horizon of frames per layer for `num_sessions` requests, at clocks of their own.

    One step is one frame of each request in the batch: `admit`, `plan`, a forward that writes every
    pass with `LayerRingCache.upsert` and its last one with `commit=True`, then `commit`. K/V is
    written in the forward and cannot be taken back, so a step that must not run has to be refused
    before. `layers` are the caches, one per layer.
    """

    def __init__(
        self,
        config: RingKVConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_tokens: int = SPARSE_BLOCK_TOKENS,
        world_size: int = 1,
    ) -> None:
        config.shard(world_size)
        self.config = config
        self._device = torch.device(device)
        self.layers = tuple(
            LayerRingCache(
                layer,
                tokens_per_frame=config.tokens_per_frame,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                total_sessions=config.total_sessions,
                dtype=dtype,
                device=device,
                block_tokens=block_tokens,
            )
            for layer in config.layers
        )
        self._sessions = SessionTable(config.num_sessions, frozenset(config.layers))
        self._buffers: dict[int, RowBuffers] = {}

    @classmethod
    def build(cls, spec: NodeResourceSpec, **engine_kwargs: Any) -> RingKVManager:
        """The manager of a `KVSpec` with a `RingKVConfig`; keywords as for the constructor."""
        config = spec.config if isinstance(spec, KVSpec) else spec
        if not isinstance(config, RingKVConfig):
            raise TypeError(
                "RingKVManager is built from a KVSpec with a RingKVConfig, "
                f"got {type(config).__name__}"
            )
        return cls(config, **engine_kwargs)

    def ingest_request(self, request_id: str, overrides: ResourceReqConfig | None = None) -> None:
        """Make the request known; a session is taken by its first `admit` or `load_state`."""
        self._sessions.ingest(request_id)

    def remove_request(self, request_id: str) -> None:
        self.reset_request(request_id)
        self._sessions.forget(request_id)

    def reset_request(self, request_id: str, free: bool = False) -> None:
        """Zero the request's session and free it; it stays known, and any clock may come next.

        The storage is fixed, so `free` changes nothing.
        """
        session = self._sessions.release(request_id)
        if session is not None:
            for cache in self.layers:
                cache.reset(session)

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Claim a session for each request that has none, all or nothing.

        Refused with `AdmitRuntimeError`: an id twice, never ingested, without a clock or beyond the
        free sessions; a clock other than the last committed one plus 1; a segment that is no whole
        number of frames. TypeError for a step that is no `RingKVStep`.
        """
        frames = _ring_step(step).frames
        refusal = self._sessions.refusal(ctx.request_ids, frames) or self._partial_frame(step, ctx)
        if refusal is not None:
            return AdmitOutcome(ok=False, ready=False, reason=AdmitRuntimeError(refusal))
        clocks = dict(frames)
        for request_id in ctx.request_ids:
            self._sessions.claim(request_id).admitted_clock = clocks[request_id]
        return ADMIT_OK

    def rollback_admit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Take back an admission that will not run: sessions it claimed are free again."""
        for request_id, clock in _ring_step(step).frames:
            session = self._sessions.admitted(request_id, clock)
            session.admitted_clock = None
            if session.is_blank:
                self.reset_request(request_id)

    def plan(self, step: ResourceStep, ctx: StepContext) -> RingPlan:
        """Rows in the order of `ctx.padded_request_ids`; dummies share the padding session.

        KeyError for a request without a session, RuntimeError for a frame that was not admitted.
        """
        clocks = dict(_ring_step(step).frames)
        real = set(ctx.request_ids)
        rows = [
            self._row(rid, clocks[rid]) if rid in real else self._padding_row()
            for rid in ctx.padded_request_ids
        ]
        if len(rows) not in self._buffers:
            self._buffers[len(rows)] = RowBuffers(len(rows), self.config.layers, self._device)
        return self._buffers[len(rows)].fill(ctx.padded_request_ids, rows)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Advance the clocks of the admitted frames; the forward has written their K/V."""
        frames = _ring_step(step).frames
        for session in [self._sessions.admitted(rid, clock) for rid, clock in frames]:
            session.commit()

    def get_state(self, request_id: str) -> list[RingLayerState]:
        """A copy of the request's rings, layer by layer; KeyError when it holds no session."""
        session = self._sessions.require(request_id)
        return [cache.get_state(session.index) for cache in self.layers]

    def load_state(self, request_id: str, state: Sequence[RingLayerState]) -> None:
        """Put a saved world in place of the request's own, taking a session if it holds none.

        Any clock may come next: pass the one that follows the saved world's last frame. ValueError
        for a wrong layer count, shape or dtype, KeyError for an unknown request, RuntimeError when
        no session is free; nothing is changed then.
        """
        if len(state) != len(self.layers):
            raise ValueError(f"state must hold {len(self.layers)} layers, got {len(state)}")
        for cache, layer_state in zip(self.layers, state, strict=True):
            cache.check_state(layer_state)
        session = self._sessions.claim(request_id)
        session.last_clock = session.admitted_clock = None
        session.is_blank = False
        for cache, layer_state in zip(self.layers, state, strict=True):
            cache.load_state(session.index, layer_state)
            session.ledgers[cache.layer].restore(cache.written_slots(session.index))

    def post_warmup_validate(self) -> None:
        """RuntimeError if warm-up left a session claimed or frames behind in one.

        The padding session is exempt: its rows are never read by a request.
        """
        if claimed := self._sessions.claimed():
            raise RuntimeError(f"warm-up must leave no session claimed, got {claimed}: remove them")
        for index, cache in enumerate(self.layers):
            for session in range(self.config.num_sessions):
                if any(cache.written_slots(session)):
                    raise RuntimeError(
                        f"warm-up must leave every ring empty, session {session} of layer {index} "
                        "holds frames: run warm-up on padding rows"
                    )

    def memory_report(self) -> RingMemory:
        """K/V bytes that are allocated, the padding session included."""
        return ring_memory(self.config, self.layers[0].kv.element_size())

    def _row(self, request_id: str, frame: int) -> RingRow:
        session = self._sessions.admitted(request_id, frame)
        slots = {g: ledger.visible_slots(frame) for g, ledger in session.ledgers.items()}
        return RingRow(session=session.index, frame=frame, slots=slots)

    def _padding_row(self) -> RingRow:
        empty = dict.fromkeys(self.config.layers, ())
        return RingRow(session=self.config.num_sessions, frame=0, slots=empty)

    def _partial_frame(self, step: ResourceStep, ctx: StepContext) -> str | None:
        tokens = self.config.tokens_per_frame
        for segment in step.segments or ():
            if segment.request_id in ctx.request_ids and segment.span % tokens:
                return (
                    f"span of request {segment.request_id!r} must be whole frames of {tokens} "
                    f"tokens, got {segment.span}: pad the last frame"
                )
        return None


def _ring_step(step: ResourceStep) -> RingKVStep:
    if not isinstance(step, RingKVStep):
        raise TypeError(f"a ring resource takes a RingKVStep, got {type(step).__name__}")
    return step
