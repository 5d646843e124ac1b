from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from mstar_plugin.attention import flex as flex_module
from mstar_plugin.attention.flex import can_compile, ring_attention
from mstar_plugin.attention.ring_reference import (
    frame_mask,
    masked_attention,
    ring_attention_reference,
)
from mstar_plugin.kv.config import RingKVConfig, RingKVLayerConfig, RingKVStep
from mstar_plugin.ring.manager import RingKVManager
from mstar_plugin.ring.plan import RingTable
from mstar_plugin.step import StepContext

T, D, Q_HEADS, KV_HEADS = 16, 16, 4, 2
GEOMETRIES = {
    "dense": RingKVLayerConfig(16, 16, 1),
    "dilated": RingKVLayerConfig(16, 4, 8),
}
NUM_PASSES = 3

needs_compiler = pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler or no AVX2")
compiles = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
Attend = Callable[..., Tensor]


def random_rows(num_rows: int, heads: int) -> Tensor:
    return torch.randn(num_rows, heads, T, D)


def poisoned_manager(num_sessions: int) -> RingKVManager:
    config = RingKVConfig(
        num_layers=len(GEOMETRIES),
        num_kv_heads=KV_HEADS,
        head_dim=D,
        num_qo_heads=Q_HEADS,
        tokens_per_frame=T,
        layers=tuple(GEOMETRIES.values()),
        num_sessions=num_sessions,
    )
    manager = RingKVManager(config, block_tokens=T)
    for cache in manager.layers:
        cache.kv.fill_(torch.nan)
    return manager


@dataclass
class Histories:
    """Every committed frame of each request, layer by layer."""

    frames: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def expected(self, rid: str, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = self.frames.setdefault((rid, layer), [])
        keys, values = (torch.stack(x, 1) for x in zip(*past, (k, v), strict=True))
        geometry = list(GEOMETRIES.values())[layer]
        return ring_attention_reference(
            q, keys, values, len(past), geometry.pinned_dilation, geometry.ring_buckets
        )

    def commit(self, rid: str, layer: int, k: Tensor, v: Tensor) -> None:
        self.frames[rid, layer].append((k, v))


def differences(joins: dict[str, int], num_frames: int, attend: Attend) -> Iterator[float]:
    """Largest difference to the reference, pass by pass, of sessions that join at given steps."""
    manager, histories = poisoned_manager(len(joins)), Histories()
    for rid in joins:
        manager.ingest_request(rid)
    for now in range(num_frames):
        rids = [rid for rid, joined in joins.items() if now >= joined]
        step = RingKVStep(frames=tuple((rid, now - joins[rid]) for rid in rids))
        dummies = [f"dummy{i}" for i in range(len(joins) + 1 - len(rids))]
        ctx = StepContext(request_ids=rids, padded_request_ids=[*rids, *dummies])
        assert manager.admit(step, ctx).ok
        yield from passes(manager, step, ctx, histories, attend)
        manager.commit(step, ctx)


def passes(
    manager: RingKVManager,
    step: RingKVStep,
    ctx: StepContext,
    histories: Histories,
    attend: Attend,
) -> Iterator[float]:
    plan = manager.plan(step, ctx)
    num_rows = len(ctx.padded_request_ids)
    for number in range(NUM_PASSES):
        commit = number == NUM_PASSES - 1
        for layer, cache in enumerate(manager.layers):
            q, k, v = (random_rows(num_rows, heads) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
            cache.upsert(k, v, plan.session_idx, plan.frame_pos, commit=commit)
            got = attend(q, cache, plan.tables[layer])
            for row, rid in enumerate(ctx.request_ids):
                expected = histories.expected(rid, layer, q[row], k[row], v[row])
                yield (got[row] - expected).abs().max().item()
                if commit:
                    histories.commit(rid, layer, k[row], v[row])


gather = partial(ring_attention, path="gather")
flex = partial(ring_attention, path="flex")


def test_gathered_attention_equals_the_reference_before_at_and_after_the_wrap() -> None:
    torch.manual_seed(0)
    assert max(differences({"a": 0, "b": 3, "c": 17}, 70, gather)) < 2e-6


@needs_compiler
@compiles
def test_compiled_attention_equals_the_reference_before_at_and_after_the_wrap() -> None:
    torch.manual_seed(1)
    assert max(differences({"a": 0, "b": 3, "c": 17}, 70, flex)) < 2e-6


def test_the_visibility_on_the_device_equals_the_planned_table() -> None:
    manager = poisoned_manager(2)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    for now in range(70):
        rids = ["b", "a"] if now >= 5 else ["a"]
        step = RingKVStep(frames=tuple((rid, now - 5 * (rid == "b")) for rid in rids))
        ctx = StepContext(request_ids=rids)
        manager.admit(step, ctx)
        plan = manager.plan(step, ctx)
        for cache, table in zip(manager.layers, plan.tables, strict=True):
            visible = cache.visible(plan.session_idx, plan.frame_pos)
            for row, count in enumerate(table.counts.tolist()):
                places = table.places[row, :count, None] * T + torch.arange(T)
                assert visible[row].nonzero()[:, 0].tolist() == places.flatten().tolist()
            k = random_rows(len(rids), KV_HEADS)
            cache.upsert(k, k, plan.session_idx, plan.frame_pos, commit=True)
        manager.commit(step, ctx)


@pytest.mark.parametrize(("dilation", "buckets"), [(1, 16), (8, 4), (3, 5)])
def test_the_reference_per_frame_equals_one_pass_with_the_frame_mask(
    dilation: int, buckets: int
) -> None:
    torch.manual_seed(2)
    num_frames = 2 * dilation * buckets + 3
    q, k, v = (torch.randn(heads, num_frames, 2, D) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    mask = frame_mask(num_frames, dilation, buckets)
    mask = mask.repeat_interleave(2, 0).repeat_interleave(2, 1)
    flat = [x.flatten(1, 2) for x in (q, k, v)]
    together = masked_attention(flat[0], flat[1], flat[2], mask, D**-0.5).view(Q_HEADS, -1, 2, D)
    for frame in range(num_frames):
        alone = ring_attention_reference(q[:, frame], k, v, frame, dilation, buckets)
        torch.testing.assert_close(alone, together[:, frame], atol=1e-6, rtol=1e-5)


def test_a_hidden_slot_that_holds_nan_changes_nothing_in_the_reference() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 4, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, 2] = False
    clean = masked_attention(q, k, v, mask, 1.0)
    k[:, 2], v[:, 2] = torch.nan, torch.nan
    assert torch.equal(masked_attention(q, k, v, mask, 1.0), clean)


def test_low_precision_stays_within_the_rounding_of_its_type() -> None:
    torch.manual_seed(4)
    manager = RingKVManager(poisoned_manager(1).config, dtype=torch.bfloat16, block_tokens=T)
    manager.ingest_request("a")
    step, ctx = RingKVStep(frames=(("a", 0),)), StepContext(request_ids=["a"])
    manager.admit(step, ctx)
    plan, cache = manager.plan(step, ctx), manager.layers[0]
    q, k, v = (random_rows(1, heads).bfloat16() for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    cache.upsert(k, v, plan.session_idx, plan.frame_pos, commit=True)
    expected = ring_attention_reference(q[0], k[0][:, None], v[0][:, None], 0, 1, 16)
    got = gather(q, cache, plan.tables[0])[0].float()
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_the_compiled_path_is_refused_where_nothing_compiles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex_module, "can_compile", lambda device_type: False)
    cache = poisoned_manager(1).layers[0]
    table = RingTable(torch.zeros(1, 17, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="path flex needs a GPU, .* pass path='gather'"):
        flex(random_rows(1, Q_HEADS), cache, table)
