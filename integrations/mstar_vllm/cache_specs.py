"""KV cache specs: what a converted layer's blocks are, and how many one request can hold."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import max_resident_pages, protected_pages
from mstar_vllm.positions import ABSOLUTE, ROLLING, policy_with, positions_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOT_OURS = tuple(
    field.name
    for field in fields(FullAttentionSpec)
    if field.name not in {known.name for known in fields(AttentionSpec)}
)


@dataclass(frozen=True, kw_only=True)
class RetentionSpec(AttentionSpec):
    """A full-attention layer whose requests may be bounded.

    It does not derive from `FullAttentionSpec`, whose `merge` would turn it back into one. The
    scheduler counts in blocks of `page_tokens`; a kernel's smaller blocks keep that number.
    """

    context_budget: int | None = None
    """The server's budget in tokens; None where only requests bring policies."""
    protected_prefix: int = 0
    """The server's protected tokens."""
    positions: str = ABSOLUTE
    """How the server's requests see their protected keys, see `mstar_vllm.positions`."""
    keeps_copies: bool = False
    """Whether requests with rolling positions hold turned copies of their protected pages."""
    in_flight_tokens: int = 0
    """Tokens that can be scheduled and not yet settled, lookahead included."""
    release_tokens: int | None = None
    """Tokens of the page that is released at once, where it is not the block itself."""

    @property
    def page_tokens(self) -> int:
        """Tokens of the page that is released at once."""
        return self.release_tokens or self.block_size

    @property
    def policy(self) -> RetentionPolicy | None:
        """The server's policy."""
        if self.context_budget is None:
            return None
        return policy_with(self.context_budget, self.protected_prefix, self.positions)

    def cap_blocks(self, policy: RetentionPolicy | None) -> int | None:
        """Most blocks a request under `policy` holds at once; None where nothing bounds it."""
        if policy is None:
            return None
        resident = max_resident_pages(
            policy.context_budget,
            policy.protected_prefix,
            self.page_tokens,
            self.in_flight_tokens,
        )
        return resident + self.spare_pages(policy)

    def spare_pages(self, policy: RetentionPolicy | None) -> int:
        """Pages that the copies add to a request's most: themselves, and one that lies between."""
        copies = self.copied_pages(policy)
        return copies + 1 if copies else 0

    def copied_pages(self, policy: RetentionPolicy | None) -> int:
        """Pages that a request under `policy` keeps a turned copy of."""
        return self.turned_pages(policy) if self.keeps_copies else 0

    def turned_pages(self, policy: RetentionPolicy | None) -> int:
        """Protected pages that a request under `policy` sees at a distance that stays."""
        if policy is None or positions_of(policy) != ROLLING:
            return 0
        return protected_pages(policy.protected_prefix, self.page_tokens)

    def turned_blocks(self) -> int:
        """Blocks of the pages that the server's requests see at a distance that stays."""
        return self.turned_pages(self.policy) * self.page_tokens // self.block_size

    def admission_cap(self) -> int | None:
        """Most blocks any request of this server holds: a page more than the server's own policy.

        A request may move tokens from the budget to the prefix, whose rounding can add one page.
        """
        cap = self.cap_blocks(self.policy)
        return None if cap is None else cap + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        blocks = self.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len)
        cap = self.admission_cap()
        return min(blocks, cap or blocks) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return cdiv(max_len, self.block_size) + self.spare_pages(self.policy)

    def copy_with_new_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size, release_tokens=self.page_tokens)


def converted(
    spec: AttentionSpec,
    policy: RetentionPolicy | None,
    in_flight_tokens: int,
    keeps_copies: bool = False,
) -> AttentionSpec:
    """`spec` as a `RetentionSpec` where it is plain full attention, else `spec` itself."""
    if type(spec) is not FullAttentionSpec or is_special(spec):
        return spec
    return replace_as(
        spec,
        RetentionSpec,
        drop=NOT_OURS,
        context_budget=policy.context_budget if policy else None,
        protected_prefix=policy.protected_prefix if policy else 0,
        positions=positions_of(policy),
        keeps_copies=keeps_copies,
        in_flight_tokens=in_flight_tokens,
    )


def is_special(spec: FullAttentionSpec) -> bool:
    """Whether a layer of this spec sees less or more than everything before it."""
    return bool(spec.sliding_window or spec.attention_chunk_size or spec.non_causal)
