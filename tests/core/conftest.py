"""A driver for the KV manager that mirrors every stream as a plain list of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_plugin.kv.config import KVLayout, KVReqConfig, KVStep, PagedKVConfig
from mstar_plugin.kv.manager import KVManager
from mstar_plugin.kv.plan import KVPlanOutputs
from mstar_plugin.step import AdmitFailedReason, Segment, StepContext

Name = tuple[str, str]
NUM_LAYERS = 2


class Driver:
    """Runs whole steps. Token number `n` is written as K `[n, layer]` and V `[-n, layer]`, so what
    a stream shows is compared with the numbers it was given, exactly.
    """

    def __init__(self, **overrides: Any) -> None:
        engine = {
            key: overrides.pop(key)
            for key in ("world_size", "admission", "padding_pages", "device")
            if key in overrides
        }
        shape: dict[str, Any] = {
            "num_layers": NUM_LAYERS,
            "num_kv_heads": 1,
            "head_dim": 2,
            "max_seq_len": 10_000,
            "max_num_pages": 64,
            "page_size": 4,
        }
        self.manager = KVManager(PagedKVConfig(**{**shape, **overrides}), **engine)
        self.device = self.manager.cache.data.device
        self.tokens: dict[Name, list[int]] = {}
        self.scripts: dict[Name, list[int]] = {}
        self.latent = self.manager.config.layout is KVLayout.MLA
        self._next_token = 1

    def ingest(self, *request_ids: str, **declared: Any) -> None:
        for request_id in request_ids:
            config = KVReqConfig(**declared) if declared else None
            self.manager.ingest_request(request_id, config)
            self.tokens.setdefault((request_id, "main"), [])

    def declare(
        self, segments: Sequence[tuple[str, str, int]], **options: Any
    ) -> tuple[KVStep, StepContext]:
        context = {
            key: options.pop(key)
            for key in ("slot", "capture", "is_preplan", "padded_request_ids", "graph_walk")
            if key in options
        }
        ids = options.pop("request_ids", None) or tuple(dict.fromkeys(s[0] for s in segments))
        step = KVStep(tuple(Segment(*segment) for segment in segments), **options)
        return step, StepContext(request_ids=ids, node="node", **context)

    def refused(self, *segments: tuple[str, str, int], **options: Any) -> AdmitFailedReason:
        free = self.manager.num_free_pages
        outcome = self.manager.admit(*self.declare(segments, **options))
        assert not outcome.ok and outcome.reason is not None
        self.manager.assert_pages_conserved()
        assert self.manager.num_free_pages >= free
        return outcome.reason

    def run(self, *segments: tuple[str, str, int], **options: Any) -> KVPlanOutputs:
        """Admit, plan, write, check what the step reads, commit, check what is kept."""
        step, ctx = self.declare(segments, **options)
        outcome = self.manager.admit(step, ctx)
        assert outcome.ok, outcome.reason
        outputs = self.manager.plan(step, ctx)
        self.finish(step, ctx, outputs)
        return outputs

    def finish(self, step: KVStep, ctx: StepContext, outputs: KVPlanOutputs) -> None:
        self.finish_unchecked(step, ctx, outputs)
        self.check()

    def finish_unchecked(self, step: KVStep, ctx: StepContext, outputs: KVPlanOutputs) -> None:
        self._fork(step.pre_forks, step, ctx)
        written = self.write(outputs)
        self.check_reads(step, outputs, written)
        self.manager.commit(step, ctx)
        if step.commit:
            for name, tokens in written.items():
                if name not in step.sink and name[0] in ctx.request_ids and name[0] in self.known():
                    self.tokens.setdefault(name, []).extend(tokens)
                    self.scripts[name] = self.scripts.get(name, [])[len(tokens) :]
            self._retain(step)
            self._fork(step.post_forks, step, ctx)

    def write(self, outputs: KVPlanOutputs) -> dict[Name, list[int]]:
        written: dict[Name, list[int]] = {}
        for label, output in outputs.items():
            packed: list[int] = []
            for view in output.views:
                fresh = self.next_tokens((view.request_id, view.label), view.to_compute)
                written[view.request_id, view.label] = fresh
                packed += fresh
            for layer in range(NUM_LAYERS):
                k, v = self.values(packed, layer)
                self.manager.write_kv(k, v, layer=layer, label=label)
        return written

    def next_tokens(self, name: Name, count: int) -> list[int]:
        """The tokens a stream writes next: those of its script, then numbers never used before."""
        planned = self.scripts.get(name, [])[:count]
        fresh = range(self._next_token, self._next_token + count - len(planned))
        self._next_token += len(fresh)
        return [*planned, *fresh]

    def values(self, tokens: Sequence[int], layer: int) -> tuple[Tensor, Tensor | None]:
        numbers = torch.tensor(tokens, dtype=torch.float32, device=self.device)
        k = torch.stack([numbers, torch.full_like(numbers, layer)], dim=-1)
        if self.latent:
            return k, None
        return k[:, None, :], k[:, None, :] * torch.tensor([-1.0, 1.0], device=self.device)

    def check_reads(
        self, step: KVStep, outputs: KVPlanOutputs, written: Mapping[Name, list[int]]
    ) -> None:
        """The forward reads, row after row, what is stored and what the step has just written."""
        for label, output in outputs.items():
            names = [(view.request_id, view.label) for view in output.views]
            if any(name in step.sink or name[0] not in self.known() for name in names):
                continue
            expected = [t for name in names for t in self.tokens.get(name, []) + written[name]]
            for layer in range(NUM_LAYERS):
                self._same(self.manager.read_kv(layer=layer, label=label), expected, layer)

    def check(self) -> None:
        """Every stream that is on the device shows its tokens, and no page is lost."""
        self.manager.assert_pages_conserved()
        for (request_id, label), tokens in self.tokens.items():
            if not self.manager.is_offloaded(request_id):
                self.check_stream(request_id, label, tokens)

    def check_stream(self, request_id: str, label: str, tokens: Sequence[int]) -> None:
        for layer in range(NUM_LAYERS):
            self._same(self.manager.read_stream(request_id, label, layer), tokens, layer)

    def known(self) -> set[str]:
        return {request_id for request_id, _ in self.tokens}

    def forget(self, request_id: str) -> None:
        self.tokens = {name: t for name, t in self.tokens.items() if name[0] != request_id}
        self.scripts = {name: t for name, t in self.scripts.items() if name[0] != request_id}

    def _same(self, got: tuple[Tensor, Tensor | None], tokens: Sequence[int], layer: int) -> None:
        k, v = self.values(tokens, layer)
        assert torch.equal(got[0], k), (got[0][..., 0].flatten().tolist(), tokens)
        assert (got[1] is None) == (v is None)
        assert v is None or (got[1] is not None and torch.equal(got[1], v))

    def _fork(self, forks: Sequence[Name], step: KVStep, ctx: StepContext) -> None:
        for request_id in ctx.request_ids:
            if step.fork_rids is not None and request_id not in step.fork_rids:
                continue
            if request_id not in self.known():
                continue
            for source, target in forks:
                if not {(request_id, source), (request_id, target)} & step.sink:
                    copied = self.tokens.get((request_id, source), [])
                    self.tokens[request_id, target] = list(copied)
                    self.scripts.pop((request_id, target), None)

    def _retain(self, step: KVStep) -> None:
        """The commit rule of a policy, token by token: the oldest whole pages go."""
        size = self.manager.config.page_size
        for segment in step.segments or ():
            policy = step.retention.get(segment[:2])
            if policy is None or not segment.span or segment[:2] in step.sink:
                continue
            if segment.request_id not in self.known():
                continue
            tokens = self.tokens[segment[:2]]
            prefix, budget = policy.protected_prefix, policy.context_budget
            first = -(-prefix // size) * size
            while len(tokens) - prefix - budget >= size and len(tokens) >= first + size:
                del tokens[first : first + size]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def make_driver() -> type[Driver]:
    return Driver
