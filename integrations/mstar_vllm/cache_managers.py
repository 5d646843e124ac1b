"""Scheduler side: managers that release a bounded request's blocks and share only what policies
cannot change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import (
    copy_page,
    first_release,
    protected_pages,
    released_pages,
)
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.metrics import Counts, counts_writer
from mstar_vllm.policy import request_policy
from mstar_vllm.ring_managers import RingManager
from mstar_vllm.ring_specs import RingSpec
from mstar_vllm.scheduler_hooks import hook_scheduler

_REMEMBERED_REQUESTS = 4096


def register_specs() -> None:
    """Register the specs with their managers, after vLLM's own."""
    KVCacheSpecRegistry.register(RetentionSpec, RetentionManager, RetentionSpec)
    KVCacheSpecRegistry.register(RingSpec, RingManager, RingSpec)
    hook_scheduler()


class RetentionManager(SingleTypeKVCacheManager):
    """Blocks of layers whose requests may be bounded.

    A request's own policy is known from its arrival on. It is kept over a preemption, which vLLM
    does not tell from the request's end.
    """

    kv_cache_spec: RetentionSpec

    def __init__(self, kv_cache_spec: RetentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.max_admission_blocks_per_request = kv_cache_spec.admission_cap()
        self._shares_blocks = self.enable_caching
        # The coordinator shows requests only to managers that cache.
        self.enable_caching = True
        self._own_policies: OrderedDict[str, RetentionPolicy] = OrderedDict()
        self._released: dict[str, int] = {}
        self._counts = Counts()
        self._counts_writer = counts_writer(self.kv_cache_group_id)

    def policy_of(self, request_id: str) -> RetentionPolicy | None:
        """The policy that holds for a request, the server's where it brought none."""
        return self._own_policies.get(request_id, self.kv_cache_spec.policy)

    def learn(self, request: Request) -> RetentionPolicy | None:
        """Remember a request's own policy; returns the one that holds for it."""
        params = request.sampling_params
        extra = params.extra_args if params else None
        server = self.kv_cache_spec.policy
        policy = request_policy(extra, server, request.num_prompt_tokens)
        if policy is not None and policy is not server:
            self._own_policies[request.request_id] = policy
            self._own_policies.move_to_end(request.request_id)
            self._forget_oldest()
        return policy

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        policy = self.policy_of(request_id)
        if policy is None:
            return
        page = self.kv_cache_spec.page_tokens
        budget, prefix = policy.context_budget, policy.protected_prefix
        released = released_pages(processed_computed_tokens, budget, prefix, page)
        first = protected_pages(prefix, page)
        if released > self._released.get(request_id, 0):
            self._remove_blocks_in_range(request_id, first, first + released)
            self._counts.released_pages += released - self._released.get(request_id, 0)
            self._released[request_id] = released

    def released_tokens(self, request_id: str) -> int:
        """Tokens of a live request whose blocks were released."""
        return self._released.get(request_id, 0) * self.block_size

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._released.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def new_step_starts(self) -> None:
        if self._released or self._counts.bounded_requests:
            self._counts.bounded_requests = len(self._released)
            self._counts.saved_pages = sum(self._released.values())
            held = sum(len(self.req_to_blocks[request_id]) for request_id in self._released)
            self._counts.bounded_pages = held - self._counts.saved_pages
            self._counts_writer.write(self._counts)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        num_tokens = self._with_copies(request_id, num_tokens)
        own = self._own_policies.get(request_id)
        if own is not None and kwargs.get("apply_admission_cap"):
            cap = self.kv_cache_spec.cap_blocks(own)
            num_tokens = min(num_tokens, (cap or 0) * self.block_size)
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        return super().allocate_new_blocks(
            request_id, self._with_copies(request_id, num_tokens), num_tokens_main_model
        )

    def _with_copies(self, request_id: str, num_tokens: int) -> int:
        """Tokens that the request's blocks must have room for, its turned copies included."""
        policy = self.policy_of(request_id)
        page = self.kv_cache_spec.page_tokens
        copies = self.kv_cache_spec.copied_pages(policy)
        if policy is None or not copies:
            return num_tokens
        budget, prefix, last = policy.context_budget, policy.protected_prefix, num_tokens - 1
        if not released_pages(last, budget, prefix, page):
            return num_tokens
        return (copy_page(last, budget, prefix, page) + copies) * page

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        policy = self.learn(request)
        if not self._shares_blocks:
            return
        if policy is not None:
            num_tokens = min(num_tokens, self._dense_limit(policy))
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        hits: list[Any] = []
        for block_hash in islice(hashes, max_length // block_size):
            cached = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if not cached:
                break
            hits.append(cached)
        length = (len(hits) - bool(drop_eagle_block and hits)) * block_size
        length -= length % alignment_tokens
        del hits[length // block_size :]
        groups = range(len(kv_cache_group_ids))
        return tuple([blocks[group] for blocks in hits] for group in groups), length

    def _forget_oldest(self) -> None:
        while len(self._own_policies) > _REMEMBERED_REQUESTS:
            oldest = next(iter(self._own_policies))
            if oldest in self.req_to_blocks:
                return
            del self._own_policies[oldest]

    def _dense_limit(self, policy: RetentionPolicy) -> int:
        """Tokens whose keys and values are those of full attention, whatever the policy."""
        page = self.kv_cache_spec.page_tokens
        return first_release(policy.context_budget, policy.protected_prefix, page)
