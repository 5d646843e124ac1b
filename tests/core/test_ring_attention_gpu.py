"""Ring attention on a CUDA card: equal to the reference, and replayable as a captured graph."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from mstar_plugin.attention.flex import ring_attention
from mstar_plugin.attention.ring_reference import ring_attention_reference
from mstar_plugin.kv.config import RingKVConfig, RingKVLayerConfig, RingKVStep
from mstar_plugin.ring.manager import RingKVManager
from mstar_plugin.ring.plan import RingPlan
from mstar_plugin.step import StepContext

pytestmark = pytest.mark.gpu

T, D, Q_HEADS, KV_HEADS, ROWS = 128, 64, 4, 2, 4
LAYERS = (RingKVLayerConfig(16, 16, 1), RingKVLayerConfig(16, 4, 8))
JOINS = {"a": 0, "b": 3, "c": 17}


class Pass:
    """Tensors of one pass at fixed addresses, and the layers' outputs."""

    def __init__(self, manager: RingKVManager, dtype: torch.dtype) -> None:
        def buffers(heads: int) -> list[Tensor]:
            shape = (len(LAYERS), ROWS, heads, T, D)
            return list(torch.zeros(shape, dtype=dtype, device="cuda"))

        self.manager = manager
        self.q, self.k, self.v = buffers(Q_HEADS), buffers(KV_HEADS), buffers(KV_HEADS)
        self.out = buffers(Q_HEADS)

    def draw(self) -> None:
        for buffer in (*self.q, *self.k, *self.v):
            buffer.normal_()

    def run(self, plan: RingPlan, *, commit: bool) -> None:
        for layer, cache in enumerate(self.manager.layers):
            cache.upsert(
                self.k[layer], self.v[layer], plan.session_idx, plan.frame_pos, commit=commit
            )
            self.out[layer].copy_(ring_attention(self.q[layer], cache, plan.tables[layer]))


def poisoned_manager(dtype: torch.dtype) -> RingKVManager:
    config = RingKVConfig(
        num_layers=len(LAYERS),
        num_kv_heads=KV_HEADS,
        head_dim=D,
        num_qo_heads=Q_HEADS,
        tokens_per_frame=T,
        layers=LAYERS,
        num_sessions=len(JOINS),
    )
    manager = RingKVManager(config, dtype=dtype, device="cuda")
    for rid in JOINS:
        manager.ingest_request(rid)
    poison(manager)
    return manager


def poison(manager: RingKVManager) -> None:
    for cache in manager.layers:
        cache.kv.fill_(torch.nan)


def frame_at(now: int) -> tuple[RingKVStep, StepContext]:
    rids = [rid for rid, joined in JOINS.items() if now >= joined]
    padding = [f"dummy{i}" for i in range(ROWS - len(rids))]
    step = RingKVStep(frames=tuple((rid, now - JOINS[rid]) for rid in rids))
    return step, StepContext(request_ids=rids, padded_request_ids=[*rids, *padding])


def captured(work: Pass, plan: RingPlan, *, commit: bool) -> torch.cuda.CUDAGraph:
    work.run(plan, commit=commit)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run(plan, commit=commit)
    return graph


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_pass_on_the_card_equals_the_reference(
    dtype: torch.dtype, tolerance: float, replays: bool
) -> None:
    manager = poisoned_manager(dtype)
    work = Pass(manager, dtype)
    warmup = StepContext(request_ids=[], padded_request_ids=[f"dummy{i}" for i in range(ROWS)])
    plan = manager.plan(RingKVStep(frames=()), warmup)
    graphs = {c: captured(work, plan, commit=c) for c in (False, True)} if replays else {}
    poison(manager)
    history: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for now in range(40):
        step, ctx = frame_at(now)
        assert manager.admit(step, ctx).ok
        plan = manager.plan(step, ctx)
        for commit in (False, True):
            work.draw()
            if replays:
                graphs[commit].replay()
            else:
                work.run(plan, commit=commit)
            assert largest_error(work, history, ctx, commit=commit) < tolerance
        manager.commit(step, ctx)


def largest_error(
    work: Pass,
    history: dict[tuple[str, int], list[tuple[Tensor, Tensor]]],
    ctx: StepContext,
    *,
    commit: bool,
) -> float:
    errors = []
    for layer, geometry in enumerate(LAYERS):
        for row, rid in enumerate(ctx.request_ids):
            past = history[rid, layer]
            frames = [*past, (work.k[layer][row].clone(), work.v[layer][row].clone())]
            keys, values = (torch.stack(x, 1).cpu() for x in zip(*frames, strict=True))
            expected = ring_attention_reference(
                work.q[layer][row].cpu(),
                keys,
                values,
                len(past),
                geometry.pinned_dilation,
                geometry.ring_buckets,
            )
            errors.append((work.out[layer][row].cpu().float() - expected).abs().max().item())
            if commit:
                history[rid, layer] = frames
    return max(errors)
