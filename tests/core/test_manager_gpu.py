"""The KV manager with its pages on a CUDA device and its host pool in page-locked memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.step import StepContext

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_card(make_driver: Any) -> Any:
    return make_driver(device="cuda", cpu_offload_pages=40)


def test_streams_on_the_card_show_what_was_written_forked_and_released(on_card: Any) -> None:
    on_card.ingest("a", "b")
    on_card.run(("a", "main", 13), ("b", "main", 6))
    on_card.run(("a", "main", 1), ("b", "main", 1), post_forks=(("main", "x"),))
    policy = {("a", "main"): RetentionPolicy(5, 3)}
    for _ in range(9):
        on_card.run(
            ("a", "main", 1),
            ("a", "x", 1),
            combined_labels={("main", "x"): "_both"},
            retention=policy,
        )
    assert on_card.manager.released_tokens("a") == 12


def test_index_arrays_of_the_last_plan_stay_while_the_next_is_made(on_card: Any) -> None:
    on_card.ingest("a")
    first = on_card.run(("a", "main", 9))["main"].cpu_indptrs
    kept = [array.clone() for array in first[:4]]
    second = on_card.run(("a", "main", 1))["main"].cpu_indptrs
    assert all(array.is_pinned() for array in second[:4])
    for array, expected in zip(first[:4], kept, strict=True):
        assert torch.equal(array, expected)


def test_requests_leave_for_page_locked_memory_and_come_back(on_card: Any) -> None:
    on_card.ingest("a", "b")
    on_card.run(("a", "main", 13), ("b", "main", 6))
    assert on_card.manager.offload("a") == 4
    on_card.run(("b", "main", 30))
    assert on_card.manager.reload("a")
    on_card.check()


def test_a_step_planned_ahead_does_not_disturb_the_one_that_runs_on_the_card(
    on_card: Any,
) -> None:
    on_card.manager.build_cuda_graph_buffers(4)
    on_card.ingest("a", "b")
    on_card.run(("a", "main", 4), ("b", "main", 4))
    step, ctx = on_card.declare([("a", "main", 1)])
    on_card.manager.admit(step, ctx)
    outputs = on_card.manager.plan(step, ctx)
    later, later_ctx = on_card.declare([("b", "main", 3)])
    early = StepContext(request_ids=later_ctx.request_ids, node="node", is_preplan=True)
    on_card.manager.admit(later, early)
    on_card.manager.plan(later, early)
    on_card.finish(step, ctx, outputs)
    on_card.manager.admit(later, later_ctx)
    on_card.finish(later, later_ctx, on_card.manager.plan(later, later_ctx))


def test_pages_move_between_a_manager_on_the_card_and_one_on_the_host(
    on_card: Any, make_driver: Any
) -> None:
    on_host = make_driver()
    on_card.ingest("a")
    on_host.ingest("a")
    on_card.run(("a", "main", 9))
    assert on_host.manager.admit_retrieve("a", on_card.manager.publish("a", None, None)).ok
    on_host.tokens["a", "main"] = list(on_card.tokens["a", "main"])
    on_host.check()
