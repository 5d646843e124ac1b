"""Requests' own policies reach the second runner's batches, and keep full graphs away from them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import graphs, rows_v2, session

pytestmark = pytest.mark.vllm

OWN = {"mstar_context_budget": 48, "mstar_protected_prefix": 20}
CONFIG = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))


class ModelState:
    """What the mixin needs of the model state that vLLM chose."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        self.model = model
        self.seen: Any = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        pass

    def remove_request(self, req_id: str) -> None:
        pass

    def prepare_attn(self, input_batch: Any, for_capture: bool = False) -> Any:
        self.seen = rows_v2.published()
        return self.seen


@pytest.fixture
def state() -> Iterator[Any]:
    chosen: Any = rows_v2._resolve_model_state_cls(lambda *_: ModelState, CONFIG, "model")
    yield chosen(CONFIG, "model")
    rows_v2._latest = None


def request(name: str, extra: dict[str, Any] | None) -> SimpleNamespace:
    params = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[1, 2, 3])


BATCH = SimpleNamespace(
    idx_mapping=torch.tensor([2, 0]), idx_mapping_np=np.array([2, 0], dtype=np.intp)
)


def test_a_requests_policy_is_kept_in_its_slot_until_it_ends(state: Any) -> None:
    state.add_request(2, request("a", OWN))
    state.add_request(0, request("b", None))
    batch = state.prepare_attn(BATCH)
    assert batch.policies.by_slot == [None, None, RetentionPolicy(48, 20), None]
    assert batch.slots_on_host.tolist() == [2, 0]
    assert rows_v2.published() is None, "only while the metadata is built"
    state.remove_request("a")
    assert state.prepare_attn(BATCH) is None


def test_nothing_is_published_without_policies_or_at_capture(state: Any) -> None:
    state.add_request(0, request("b", {"other": 1}))
    assert state.prepare_attn(BATCH) is None
    state.add_request(1, request("a", OWN))
    assert state.prepare_attn(BATCH, for_capture=True) is None


def test_a_slot_is_free_again_for_a_request_without_a_policy(state: Any) -> None:
    state.add_request(1, request("a", OWN))
    state.remove_request("a")
    state.add_request(1, request("b", None))
    state.add_request(3, request("c", OWN))
    assert state.prepare_attn(BATCH).policies.by_slot[1] is None


def descriptor(mode: CUDAGraphMode, uniform: int | None) -> BatchExecutionDescriptor:
    num_reqs = 4 if mode is CUDAGraphMode.FULL else None
    return BatchExecutionDescriptor(
        cg_mode=mode, num_tokens=4, num_reqs=num_reqs, uniform_token_count=uniform
    )


@pytest.fixture
def manager() -> Any:
    """vLLM's manager with a full and a piecewise graph for up to four tokens."""
    made: Any = object.__new__(CudaGraphManager)
    full = descriptor(CUDAGraphMode.FULL, 1)
    made._candidates = {(3, 0): [full, descriptor(CUDAGraphMode.PIECEWISE, None)]}
    made._graphs_captured, made._lora_dispatch_map, made._max_lora_case = True, {}, 0
    return made


def dispatched(manager: Any) -> CUDAGraphMode:
    chosen = graphs._dispatch_second(CudaGraphManager.dispatch, manager, 3, 3, 1, 0)
    mode: CUDAGraphMode = chosen.cg_mode
    return mode


def plan_with(retention: RetentionPolicy | None) -> Any:
    return lambda: SimpleNamespace(plan=SimpleNamespace(retention=retention))


def test_bounded_requests_keep_out_of_graphs_over_the_runners_tables(
    manager: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "current", plan_with(None))
    assert dispatched(manager) is CUDAGraphMode.FULL
    state.add_request(1, request("a", OWN))
    assert dispatched(manager) is CUDAGraphMode.PIECEWISE
    manager._candidates[3, 0].pop()
    assert dispatched(manager) is CUDAGraphMode.NONE
    state.remove_request("a")
    assert dispatched(manager) is CUDAGraphMode.FULL


def test_graphs_over_a_servers_own_tables_serve_every_request(
    manager: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "current", plan_with(RetentionPolicy(64, 20)))
    state.add_request(1, request("a", OWN))
    assert dispatched(manager) is CUDAGraphMode.FULL


def test_the_first_runner_leaves_full_graphs_out_while_a_policy_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dispatch(dispatcher: Any, **kwargs: Any) -> Any:
        return kwargs.get("invalid_modes")

    def determine(runner: Any) -> Any:
        return graphs._dispatch_first(dispatch, None, num_tokens=3)

    monkeypatch.setattr(session, "current", plan_with(None))
    bounded = SimpleNamespace(_mstar_own_policies={"a": RetentionPolicy(48, 20)})
    assert graphs._determine(determine, bounded) == {CUDAGraphMode.FULL}
    assert graphs._determine(determine, SimpleNamespace(_mstar_own_policies={})) is None
    assert graphs._dispatch_first(dispatch, None, num_tokens=3) is None
