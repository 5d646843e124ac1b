"""The scheduler's own KV cache manager with ring groups: fixed pages, waiting, no sharing."""

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

from mstar_plugin.kv.config import RingKVLayerConfig
from mstar_plugin.ring.geometry import visible_frames
from mstar_vllm.cache_managers import register_specs
from mstar_vllm.ring_plan import RingPlan
from mstar_vllm.ring_specs import RingSpec, ring_specs

pytestmark = pytest.mark.vllm

FRAME = 16
CHUNK = 40
_ids = count()
_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=FRAME, **_HEADS)
GEOMETRIES = st.tuples(st.integers(1, 5), st.integers(1, 5))


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register_all_kvcache_specs(None)
    register_specs()
    init_none_hash(sha256)


def plan_for(*geometries: tuple[int, int], chunk: int = CHUNK) -> RingPlan:
    """A plan of layers of (buckets, dilation)."""
    layers = tuple(
        RingKVLayerConfig(ring_frames=b, ring_buckets=b, pinned_dilation=d) for b, d in geometries
    )
    return RingPlan(tokens_per_frame=FRAME, layers=layers, chunk_tokens=chunk)


def specs_for(*geometries: tuple[int, int], chunk: int = CHUNK) -> list[RingSpec]:
    layers = {f"layers.{index}.attn": FULL for index in range(len(geometries))}
    found = ring_specs(plan_for(*geometries, chunk=chunk), layers).values()
    return [spec for spec in found if isinstance(spec, RingSpec)]


def manager_for(
    *specs: Any, num_blocks: int = 200, caching: bool = False, max_model_len: int = 65536
) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=max_model_len,
        scheduler_block_size=FRAME,
        hash_block_size=FRAME,
        max_in_flight_tokens=CHUNK,
        enable_caching=caching,
    )


def request_for(tokens: list[int]) -> Request:
    params = SamplingParams(max_tokens=65536)
    params.update_from_generation_config({}, eos_token_id=None)
    return Request(
        request_id=f"request-{next(_ids)}",
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(FRAME, sha256),
    )


def advance(manager: KVCacheManager, request: Request, tokens: int, first: bool = False) -> Any:
    """One step of `tokens` tokens; the new blocks, or None where the request has to wait."""
    got = manager.allocate_slots(request, tokens, full_sequence_must_fit=first)
    if got is not None:
        request.num_computed_tokens += tokens
        request.status = RequestStatus.RUNNING
    return got


def row_of(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    blocks = manager.coordinator.single_type_managers[group].req_to_blocks[request.request_id]
    return [block.block_id for block in blocks]


def free_blocks(manager: KVCacheManager) -> int:
    return int(manager.block_pool.get_num_free_blocks())


@given(
    geometries=st.lists(GEOMETRIES, min_size=1, max_size=3, unique=True),
    chunks=st.lists(st.integers(1, CHUNK), min_size=1, max_size=25),
)
@settings(max_examples=60, deadline=None)
def test_a_request_holds_its_fixed_pages_and_no_frame_in_use_shares_one(
    geometries: list[tuple[int, int]], chunks: list[int]
) -> None:
    specs = specs_for(*geometries)
    manager = manager_for(*specs)
    request = request_for([1] * sum(chunks))
    held = sum(spec.pages.num_pages for spec in specs)
    for index, tokens in enumerate(chunks):
        first = request.num_computed_tokens // FRAME
        assert advance(manager, request, tokens, first=index == 0) is not None
        assert free_blocks(manager) == 199 - held
        last = (request.num_computed_tokens - 1) // FRAME
        for group, (buckets, dilation) in enumerate(geometries):
            row = row_of(manager, request, group)
            assert len(row) == last + 1
            used = set(range(first, last + 1))
            for frame in range(first, last + 1):
                used.update(visible_frames(frame, dilation, buckets))
            assert len({row[frame] for frame in used}) == len(used)
    rows = [row_of(manager, request, group) for group in range(len(specs))]
    assert sum(len(set(row)) for row in rows) == len(set().union(*rows)), "groups share nothing"
    manager.free(request)
    assert free_blocks(manager) == 199
    assert all(block.ref_cnt == 0 for block in manager.block_pool.blocks[1:])


def test_a_long_stream_repeats_the_ids_of_its_pages() -> None:
    spec = specs_for((3, 1), chunk=1)[0]
    manager = manager_for(spec)
    request = request_for([1] * 16)
    advance(manager, request, 1, first=True)
    for _ in range(9 * FRAME - 1):
        request.append_output_token_ids(7)
        advance(manager, request, 1)
    row = row_of(manager, request)
    assert row == row[:3] * 3


def test_a_step_tells_the_worker_the_repeated_ids() -> None:
    manager = manager_for(specs_for((3, 1), chunk=16)[0])
    request = request_for([1] * 160)
    told: list[int] = []
    for index in range(10):
        told += advance(manager, request, 16, first=index == 0).get_block_ids()[0]
    assert told == row_of(manager, request)


def test_the_request_after_the_last_that_fits_waits_its_turn() -> None:
    spec = specs_for((4, 1))[0]
    pages = spec.pages.num_pages
    manager = manager_for(spec, num_blocks=1 + 2 * pages + pages - 1)
    first, second, third = (request_for([1] * 16) for _ in range(3))
    assert advance(manager, first, 16, first=True) is not None
    assert advance(manager, second, 16, first=True) is not None
    assert advance(manager, third, 16, first=True) is None
    for _ in range(200):
        first.append_output_token_ids(7)
        assert advance(manager, first, 1) is not None, "a running session never waits for a page"
    manager.free(second)
    assert advance(manager, third, 16, first=True) is not None


def test_the_pool_is_sized_by_what_a_request_claims() -> None:
    near, far = specs_for((4, 1), (4, 4))
    for spec in (near, far):
        claimed = manager_for(spec).coordinator.get_num_blocks_to_allocate(
            "new", 10_000, ([],), 0, 0, 0, 10_000, apply_admission_cap=True
        )
        assert spec.max_memory_usage_bytes(None) == claimed * spec.page_size_bytes  # type: ignore[arg-type]


def test_a_preempted_session_claims_again_and_ends_with_the_same_row_shape() -> None:
    spec = specs_for((4, 2))[0]
    manager = manager_for(spec, num_blocks=1 + spec.pages.num_pages)
    request = request_for([1] * 400)
    while request.num_computed_tokens < 400:
        advance(manager, request, CHUNK, first=request.num_computed_tokens == 0)
    before = row_of(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    request.status = RequestStatus.PREEMPTED
    while request.num_computed_tokens < 400:
        assert advance(manager, request, CHUNK, first=request.num_computed_tokens == 0) is not None
    after = row_of(manager, request)
    assert [before.index(block) for block in before] == [after.index(block) for block in after]


def test_blocks_taken_for_a_deferred_free_are_each_taken_once() -> None:
    spec = specs_for((3, 1))[0]
    manager = manager_for(spec)
    request = request_for([1] * 160)
    for index in range(4):
        advance(manager, request, CHUNK, first=index == 0)
    blocks = manager.pop_blocks_for_free(request)
    assert len(blocks) == len({block.block_id for block in blocks}) == spec.pages.num_pages
    manager.block_pool.free_blocks(reversed(blocks))
    assert free_blocks(manager) == 199


def test_freeing_a_request_that_never_ran_frees_nothing() -> None:
    manager = manager_for(specs_for((3, 1))[0])
    manager.free(request_for([1] * 16))
    assert free_blocks(manager) == 199


@pytest.mark.parametrize("geometries", [[(3, 1)], [(3, 1), (2, 4)]])
def test_nothing_is_shared_through_the_prefix_cache(geometries: list[tuple[int, int]]) -> None:
    manager = manager_for(*specs_for(*geometries), caching=True)
    tokens = list(range(1000, 1032))
    advance(manager, request_for(tokens), 32, first=True)
    assert manager.get_computed_blocks(request_for(tokens))[1] == 0
    assert not manager.block_pool.cached_block_hash_to_block._cache


def test_a_window_group_beside_a_ring_finds_no_hit_either() -> None:
    window = SlidingWindowSpec(block_size=FRAME, sliding_window=48, **_HEADS)
    manager = manager_for(specs_for((3, 1))[0], window, caching=True)
    tokens = list(range(1000, 1032))
    advance(manager, request_for(tokens), 32, first=True)
    assert manager.get_computed_blocks(request_for(tokens))[1] == 0


def test_layers_of_one_geometry_are_a_group_and_others_stay_apart() -> None:
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

    near, far, again = specs_for((4, 1), (4, 4), (4, 1))
    assert is_kv_cache_spec_uniform({"a": near, "b": again})
    assert not is_kv_cache_spec_uniform({"a": near, "b": far})
    assert not near.is_uniform_with_collection({"a": near, "b": far})


def test_only_plain_full_attention_can_keep_a_ring() -> None:
    window = SlidingWindowSpec(block_size=FRAME, sliding_window=48, **_HEADS)
    with pytest.raises(ValueError, match=r"got SlidingWindowSpec for layers\.0\.attn"):
        ring_specs(plan_for((4, 1)), {"layers.0.attn": window})


def test_converting_again_changes_nothing() -> None:
    spec = specs_for((4, 1))[0]
    assert ring_specs(plan_for((4, 1)), {"layers.0.attn": spec}) == {"layers.0.attn": spec}


def test_a_kernels_smaller_blocks_keep_the_frame() -> None:
    assert specs_for((4, 1))[0].copy_with_new_block_size(8).frame_tokens == FRAME


def test_a_block_that_is_not_a_frame_is_refused() -> None:
    scaled = replace(specs_for((4, 1))[0], block_size=2 * FRAME)
    with pytest.raises(ValueError, match="one block a frame of 16 tokens, got blocks of 32"):
        KVCacheManager(
            KVCacheConfig(
                num_blocks=20,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], scaled)],
            ),
            max_model_len=4096,
            scheduler_block_size=32,
            hash_block_size=32,
            max_in_flight_tokens=CHUNK,
        )
