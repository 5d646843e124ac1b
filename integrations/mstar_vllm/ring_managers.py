"""Scheduler side of rings: a request claims its pages at admission and returns them at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from mstar_vllm.ring_specs import RingSpec


class RingManager(SingleTypeKVCacheManager):
    """Blocks of layers of one ring geometry.

    A request's row is positional like any other: entry `f` is the block of frame `f`, so the same
    blocks come back as frames take each other's place. Each is referenced once, by the claim.
    """

    kv_cache_spec: RingSpec

    def __init__(self, kv_cache_spec: RingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        if self.block_size != kv_cache_spec.frame_tokens:
            raise ValueError(
                f"mstar needs one block a frame of {kv_cache_spec.frame_tokens} tokens, got blocks "
                f"of {self.block_size}: layers of a ring model must have KV of one size"
            )
        self._pages = kv_cache_spec.pages
        self._claimed: dict[str, list[KVCacheBlock]] = {}

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0 if request_id in self._claimed else self._pages.num_pages

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        claimed = self._claimed.get(request_id) or self._claim(request_id)
        row = self.req_to_blocks[request_id]
        frames = range(len(row), -(-num_tokens // self.block_size))
        blocks = [claimed[self._pages.page_of(frame)] for frame in frames]
        row.extend(blocks)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        super().pop_blocks_for_free(request_id)
        return self._claimed.pop(request_id, [])

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Nothing to share: a frame's block is overwritten while its request lives."""

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
        """No hit, which rules out one in every other group of the model too."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def _claim(self, request_id: str) -> list[KVCacheBlock]:
        blocks = self.block_pool.get_new_blocks(self._pages.num_pages)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in blocks)
        self._claimed[request_id] = blocks
        return blocks
