"""The scheduler's own KV cache manager with our specs: bounds, admission, sharing, conservation."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import copy_page, protected_pages, released_pages
from mstar_vllm.cache_managers import RetentionManager, register_specs
from mstar_vllm.cache_specs import RetentionSpec, converted
from mstar_vllm.positions import RollingPolicy

pytestmark = pytest.mark.vllm

BLOCK = 16
CHUNK = 64
_ids = count()
_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register_all_kvcache_specs(None)
    register_specs()
    init_none_hash(sha256)


def spec_for(policy: RetentionPolicy | None, **changes: Any) -> RetentionSpec:
    spec = converted(
        FullAttentionSpec(block_size=BLOCK, **_HEADS), policy, CHUNK, keeps_copies=True
    )
    assert isinstance(spec, RetentionSpec)
    return replace(spec, **changes)


def manager_for(
    *specs: Any, num_blocks: int = 200, caching: bool = False, max_model_len: int = 4096
) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=max_model_len,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        max_in_flight_tokens=CHUNK,
        enable_caching=caching,
    )


def request_for(tokens: list[int], salt: str | None = None, **extra: int) -> Request:
    params = SamplingParams(max_tokens=4096, extra_args=dict(extra) or None)
    params.update_from_generation_config({}, eos_token_id=None)
    return Request(
        request_id=f"request-{next(_ids)}",
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def own(policy: RetentionPolicy) -> dict[str, int]:
    return {
        "mstar_context_budget": policy.context_budget,
        "mstar_protected_prefix": policy.protected_prefix,
    }


def live_blocks(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    """Logical indices of the blocks the request holds."""
    blocks = manager.coordinator.single_type_managers[group].req_to_blocks[request.request_id]
    return [i for i, block in enumerate(blocks) if not block.is_null]


def prefill(manager: KVCacheManager, request: Request, chunk: int = CHUNK) -> list[int]:
    """Run the prompt in chunks like the scheduler; returns live block counts after each."""
    blocks, hit, _ = manager.get_computed_blocks(request)
    peaks = []
    first = True
    while request.num_computed_tokens + hit < request.num_tokens:
        done = request.num_computed_tokens + hit
        new = min(chunk, request.num_tokens - done)
        got = manager.allocate_slots(
            request, new, hit, blocks if hit else None, full_sequence_must_fit=first
        )
        assert got is not None, f"not admitted at {done}"
        request.num_computed_tokens = done + new
        request.status = RequestStatus.RUNNING
        peaks.append(len(live_blocks(manager, request)))
        hit, first = 0, False
    return peaks


def decode(manager: KVCacheManager, request: Request, steps: int) -> list[int]:
    peaks = []
    for _ in range(steps):
        request.append_output_token_ids(7)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        peaks.append(len(live_blocks(manager, request)))
    return peaks


@given(
    policy=st.builds(RetentionPolicy, st.integers(1, 200), st.integers(0, 100)),
    prompt=st.integers(1, 500),
    steps=st.integers(0, 200),
    chunk=st.integers(1, CHUNK),
)
@settings(max_examples=30, deadline=None)
def test_live_blocks_never_exceed_the_cap_and_are_the_rules(
    policy: RetentionPolicy, prompt: int, steps: int, chunk: int
) -> None:
    manager = manager_for(spec_for(policy))
    request = request_for([1] * prompt)
    peaks = prefill(manager, request, chunk) + decode(manager, request, steps)
    assert max(peaks) <= spec_for(policy).cap_blocks(policy)  # type: ignore[operator]
    manager.coordinator.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
    stored, head = request.num_computed_tokens, protected_pages(policy.protected_prefix, BLOCK)
    released = released_pages(stored, policy.context_budget, policy.protected_prefix, BLOCK)
    gone = range(head, head + released)
    assert live_blocks(manager, request) == [i for i in range(-(-stored // BLOCK)) if i not in gone]
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 199


@given(
    policy=st.builds(RollingPolicy, st.integers(1, 200), st.integers(1, 100)),
    prompt=st.integers(1, 500),
    steps=st.integers(0, 200),
    chunk=st.integers(1, CHUNK),
)
@settings(max_examples=30, deadline=None)
def test_rolling_requests_own_room_for_their_copies_within_the_cap(
    policy: RollingPolicy, prompt: int, steps: int, chunk: int
) -> None:
    spec = spec_for(policy)
    manager = manager_for(spec)
    request = request_for([1] * prompt)
    peaks = prefill(manager, request, chunk) + decode(manager, request, steps)
    assert max(peaks) <= spec.cap_blocks(policy)  # type: ignore[operator]
    last = request.num_computed_tokens - 1
    numbers = policy.context_budget, policy.protected_prefix, BLOCK
    table = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
    if released_pages(last, *numbers):
        room = copy_page(last, *numbers) + spec.copied_pages(policy)
        assert len(table) == room
        assert not any(block.is_null for block in table[room - spec.copied_pages(policy) :])
        longest = prompt + steps
        assert room <= spec.max_num_blocks_per_req(None, longest)  # type: ignore[arg-type]
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 199


@pytest.mark.parametrize("resumed_tokens", [600, 3000])
@pytest.mark.parametrize("kind", [RetentionPolicy, RollingPolicy])
def test_a_preempted_request_longer_than_the_pool_comes_back(
    kind: type[RetentionPolicy], resumed_tokens: int
) -> None:
    policy = kind(128, 32)
    manager = manager_for(spec_for(policy), num_blocks=24)
    request = request_for([1] * 40)
    prefill(manager, request)
    decode(manager, request, resumed_tokens - 40)
    manager.free(request)
    request.num_computed_tokens = 0
    request.status = RequestStatus.PREEMPTED
    assert max(prefill(manager, request)) <= spec_for(policy).cap_blocks(policy)  # type: ignore[operator]
    assert request.num_computed_tokens == resumed_tokens


def test_without_the_admission_cap_it_would_wait_for_ever() -> None:
    manager = manager_for(spec_for(RetentionPolicy(128, 32)), num_blocks=24)
    manager.coordinator.single_type_managers[0].max_admission_blocks_per_request = None
    with pytest.raises(AssertionError, match="not admitted at 0"):
        prefill(manager, request_for([1] * 1540))


def test_a_requests_own_policy_bounds_it_where_the_server_sets_none() -> None:
    manager = manager_for(spec_for(None))
    bounded = request_for([1] * 300, **own(RetentionPolicy(64, 4)))
    free = request_for([1] * 300)
    for request in (bounded, free):
        prefill(manager, request)
        decode(manager, request, 50)
    assert len(live_blocks(manager, bounded)) <= 7
    assert len(live_blocks(manager, free)) == -(-350 // BLOCK)


def test_an_own_policy_survives_preemption_and_caps_admission() -> None:
    manager = manager_for(spec_for(None), num_blocks=24)
    request = request_for([1] * 40, **own(RetentionPolicy(64, 4)))
    prefill(manager, request)
    decode(manager, request, 960)
    manager.free(request)
    request.num_computed_tokens = 0
    request.status = RequestStatus.PREEMPTED
    prefill(manager, request)
    assert request.num_computed_tokens == 1000


def test_only_the_dense_region_is_shared() -> None:
    policy = RetentionPolicy(128, 32)
    manager = manager_for(spec_for(policy), caching=True)
    tokens = list(range(1000, 1600))
    prefill(manager, request_for(tokens))
    _, hit, _ = manager.get_computed_blocks(request_for(tokens))
    assert hit == 128 + 32 + BLOCK
    assert max(prefill(manager, request_for(tokens))) <= 16


def test_an_unbounded_server_shares_everything() -> None:
    manager = manager_for(spec_for(None), caching=True)
    tokens = list(range(1000, 1600))
    prefill(manager, request_for(tokens))
    _, hit, _ = manager.get_computed_blocks(request_for(tokens))
    assert hit == 592


def test_a_window_group_beside_it_agrees_on_the_hit() -> None:
    window = SlidingWindowSpec(block_size=BLOCK, sliding_window=48, **_HEADS)
    manager = manager_for(spec_for(RetentionPolicy(128, 32)), window, caching=True)
    tokens = list(range(1000, 1600))
    prefill(manager, request_for(tokens))
    request = request_for(tokens)
    blocks, hit, _ = manager.get_computed_blocks(request)
    assert hit == 128 + 32 + BLOCK
    assert len(blocks.blocks[0]) == hit // BLOCK
    prefill(manager, request)


def test_a_request_with_an_own_policy_shares_only_with_its_like() -> None:
    manager = manager_for(spec_for(None), caching=True)
    tokens = list(range(1000, 1600))
    policy = RetentionPolicy(64, 4)
    prefill(manager, request_for(tokens, salt="|mstar:64:4", **own(policy)))
    assert manager.get_computed_blocks(request_for(tokens))[1] == 0
    alike = request_for(tokens, salt="|mstar:64:4", **own(policy))
    assert manager.get_computed_blocks(alike)[1] == 80


def test_specs_of_one_server_are_one_group_and_plain_full_attention_stays_apart() -> None:
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

    plain = FullAttentionSpec(block_size=BLOCK, **_HEADS)
    ours = spec_for(RetentionPolicy(128, 32))
    assert is_kv_cache_spec_uniform({"a": ours, "b": replace(ours)})
    assert not is_kv_cache_spec_uniform({"a": ours, "b": plain})


def test_conversion_leaves_other_layers_alone() -> None:
    window = SlidingWindowSpec(block_size=BLOCK, sliding_window=48, **_HEADS)
    inner = FullAttentionSpec(block_size=BLOCK, sliding_window=48, **_HEADS)
    both = FullAttentionSpec(block_size=BLOCK, non_causal=True, **_HEADS)
    for spec in (window, inner, both, spec_for(None)):
        assert converted(spec, RetentionPolicy(8), CHUNK) is spec


def test_a_kernels_smaller_blocks_keep_the_released_page() -> None:
    spec = spec_for(RetentionPolicy(128, 32))
    assert spec.copy_with_new_block_size(8).page_tokens == BLOCK
    assert replace(spec, block_size=64).page_tokens == 64


def test_a_manager_that_is_not_asked_to_cache_still_learns_policies() -> None:
    manager = manager_for(spec_for(None), caching=False)
    request = request_for([1] * 20, **own(RetentionPolicy(64, 4)))
    prefill(manager, request)
    retention = manager.coordinator.single_type_managers[0]
    assert isinstance(retention, RetentionManager)
    assert retention.policy_of(request.request_id) == RetentionPolicy(64, 4)
    assert not manager.block_pool.cached_block_hash_to_block._cache
