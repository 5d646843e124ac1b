"""The batch transform on CUDA: planned on the host without waiting for the device, done there.

Rows of batches that a full CUDA graph can replay come out of buffers whose addresses never change;
prefill is cut into rows as in `visibility.py` and `ring_visibility.py`. Letters in shapes: `R`
requests, `V` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import iter_layer_specs

from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_limits import DeviceBatchLimits
from mstar_vllm.device_rings import DeviceRing
from mstar_vllm.device_rows import BatchTensors, HeadRows, Pages, RowBuffers, RowPlans
from mstar_vllm.ring_specs import RingSpec
from mstar_vllm.ring_visibility import RingView
from mstar_vllm.visibility import IntArray, Rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RowRule(Protocol):
    """What the tokens of one batch see; stored: `[R]` tokens with this step's, see `DeviceLimits`
    for what each method gives.
    """

    def sees_all(self, stored: IntArray) -> bool: ...

    def split(self, query_lens: IntArray, stored: IntArray) -> Rows: ...

    def possible(self, query_lens: IntArray, stored: IntArray) -> IntArray: ...

    def visible(self, stored: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]: ...

    def longest(self, most_stored: int, stored: npt.NDArray[np.int32] | None) -> int: ...

    def fill(
        self,
        out: RowBuffers,
        batch: BatchTensors,
        pages: Pages,
        num_rows: int,
        plan: torch.Tensor | None,
    ) -> None: ...


class RowRules(Protocol):
    """The rule of each batch of a KV cache group."""

    @property
    def always(self) -> RowRule | None:
        """The rule of batches whose requests bring none, which graphs are captured under."""

    def current(self, num_requests: int) -> RowRule | None:
        """The rule of the batch being built, None where every token sees all before it."""

    def most_visible(self) -> int | None:
        """Most tokens a row can see, whatever requests bring; None where `always` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What the batches of a group can be.

    pages: what is seen or released as one, a frame for rings. drafts: speculative tokens a request
    can bring to a step. plans_on_host: whether the parent needs exact lengths on the host.
    turned_blocks: protected blocks a row can see apart.
    """

    pages: Pages
    max_requests: int
    max_model_len: int
    drafts: int
    plans_on_host: bool
    turned_blocks: int = 0

    @property
    def draft_rows(self) -> int:
        """Rows that a request's token and its drafts can fall into."""
        return 1 + -(-self.drafts // self.pages.page_tokens)


def device_visibility(
    spec: Any, vllm_config: VllmConfig, device: torch.device, plans_on_host: bool
) -> DeviceVisibility | None:
    """The transform of a group's batches; None where its layers were not converted."""
    max_requests = vllm_config.scheduler_config.max_num_seqs
    rules: RowRules
    if isinstance(spec, RetentionSpec):
        rules, page = DeviceBatchLimits(spec, max_requests, device), spec.page_tokens
        turned = spec.turned_blocks()
    elif isinstance(spec, RingSpec):
        rules, page, turned = DeviceRing(RingView.of_spec(spec)), spec.frame_tokens, 0
    else:
        return None
    shape = BatchShape(
        pages=Pages(page_tokens=page, block_tokens=spec.block_size),
        max_requests=max_requests,
        max_model_len=vllm_config.model_config.max_model_len,
        drafts=vllm_config.num_speculative_tokens,
        plans_on_host=plans_on_host,
        turned_blocks=turned,
    )
    return DeviceVisibility(shape, rules, device)


def is_bounded(spec: Any) -> bool:
    """Whether the layers of `spec` keep rings or the server's own policy holds for them."""
    return any(
        isinstance(layer, RingSpec)
        or (isinstance(layer, RetentionSpec) and layer.policy is not None)
        for layer in iter_layer_specs(spec)
    )


@dataclass(kw_only=True)
class RollingBatch(CommonAttentionMetadata):
    """A batch whose rows see their protected pages apart: rows that do hold no more than a page."""

    head: HeadRows
    page_tokens: int


@dataclass(slots=True)
class EmptyBatch:
    """One request without tokens."""

    block_table_tensor: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class DeviceVisibility:
    """The transform of one KV cache group; it owns what the kernels read."""

    def __init__(self, shape: BatchShape, rules: RowRules, device: torch.device) -> None:
        self._shape = shape
        self._rules = rules
        self._plans = RowPlans(device)
        head_width = shape.turned_blocks
        self._chunks = RowBuffers(0, 0, device, is_fixed=False, head_width=head_width)
        self._draft_plan = self._plans.uniform(shape.max_requests, shape.draft_rows)
        most_visible = rules.most_visible()
        self._most_visible = min(shape.max_model_len, most_visible or shape.max_model_len)
        is_fixed = rules.always is not None
        rows = shape.max_requests * shape.draft_rows if is_fixed else 0
        width = shape.pages.blocks(self._most_visible) if is_fixed else 0
        self._decode = RowBuffers(rows, width, device, is_fixed=is_fixed, head_width=head_width)
        self._warm_up()

    def visible(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch as its rows see it; the same object where no request is bounded, or where every
        token of a prefill sees all before it.
        """
        rule = self._rules.current(batch.num_reqs)
        if rule is None:
            return batch
        if batch.max_query_len <= 1:
            return self._visible_decode(batch, rule)
        if self._shape.plans_on_host or batch.max_query_len > 1 + self._shape.drafts:
            return self._visible_chunks(batch, rule)
        return self._visible_drafts(batch, rule)

    def _visible_decode(
        self, batch: CommonAttentionMetadata, rule: RowRule
    ) -> CommonAttentionMetadata:
        bound = upper_bound(batch)
        longest = self._longest(batch, rule, bound)
        seen = self._rows(batch, rule, self._decode, batch.num_reqs, longest, None)
        if self._shape.plans_on_host and bound is not None and not self._shape.drafts:
            seen.seq_lens_cpu_upper_bound = torch.from_numpy(rule.visible(bound))
        return seen

    def _visible_drafts(
        self, batch: CommonAttentionMetadata, rule: RowRule
    ) -> CommonAttentionMetadata:
        """As many rows for every request as drafts can need: the device, which alone knows how many
        were accepted, leaves the others empty, and a graph always finds as many.
        """
        num_rows = batch.num_reqs * self._shape.draft_rows
        longest = self._longest(batch, rule, upper_bound(batch))
        plan = self._draft_plan[:, :num_rows]
        return self._rows(batch, rule, self._decode, num_rows, longest, plan)

    def _visible_chunks(
        self, batch: CommonAttentionMetadata, rule: RowRule
    ) -> CommonAttentionMetadata:
        stored = self._stored_on_host(batch)
        if rule.sees_all(stored):
            return batch
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy()
        query_lens = np.diff(starts).astype(np.int64)
        if self._shape.drafts and not self._shape.plans_on_host:
            request = rule.possible(query_lens, stored)
            longest = self._longest(batch, rule, upper_bound(batch))
            return self._chunk_rows(batch, rule, request, longest)
        rows = rule.split(query_lens, stored)
        seen = self._chunk_rows(batch, rule, rows.request, int(rows.seq_lens.max()))
        seen.max_query_len = int(rows.query_lens.max())
        ends = np.cumsum(rows.query_lens)
        seen.query_start_loc_cpu = torch.from_numpy(np.append(0, ends).astype(np.int32))
        seen.seq_lens_cpu_upper_bound = torch.from_numpy(rows.seq_lens.astype(np.int32))
        return seen

    def _chunk_rows(
        self,
        batch: CommonAttentionMetadata,
        rule: RowRule,
        request: IntArray,
        longest: int,
    ) -> CommonAttentionMetadata:
        plan = self._plans.of_requests(request)
        return self._rows(batch, rule, self._chunks, len(request), longest, plan)

    def _rows(
        self,
        batch: CommonAttentionMetadata,
        rule: RowRule,
        out: RowBuffers,
        num_rows: int,
        longest: int,
        plan: torch.Tensor | None,
    ) -> CommonAttentionMetadata:
        """The batch with the rows of `plan`, none longer than `longest` tokens.

        The parents read boundaries and lengths of what they do not plan on the host from the
        device, so that the host's are left as they are or, where wrong, out.
        """
        out.reserve(num_rows, self._shape.pages.blocks(longest))
        rule.fill(out, batch, self._shape.pages, num_rows, plan)
        views = out.views(num_rows)
        seen = shallow_copy(batch, RollingBatch if out.head_width else type(batch))
        if isinstance(seen, RollingBatch):
            seen.head, seen.page_tokens = views.head, self._shape.pages.page_tokens
        seen.num_reqs = num_rows
        seen.seq_lens, seen.block_table_tensor = views.seq_lens, views.tables
        seen.max_seq_len = longest
        seen.seq_lens_cpu_upper_bound = None
        seen._num_computed_tokens_cache = None
        seen._token_to_req_indices_cache = None
        if plan is not None:
            seen.query_start_loc = views.query_start
            seen.is_prefilling = None
            seen.req_idx = None
        return seen

    def _warm_up(self) -> None:
        """Compile what batches whose requests bring nothing launch, before one waits for it."""
        rule = self._rules.always
        if rule is None:
            return
        tables = self._decode.tables
        batch = EmptyBatch(tables[:1], self._decode.seq_lens[:1], self._decode.query_start[:2])
        for plan in (None, self._plans.of_requests(np.zeros(1, dtype=np.int64))):
            rule.fill(self._decode, batch, self._shape.pages, 1, plan)

    def _stored_on_host(self, batch: CommonAttentionMetadata) -> IntArray:
        """`[R]` stored tokens: an upper bound where drafts make them uncertain, unless the parent
        plans on the host; it waits for the device in that case, as it would without the plugin.
        """
        bound = batch.seq_lens_cpu_upper_bound
        if bound is None or (self._shape.drafts and self._shape.plans_on_host):
            bound = batch.seq_lens.cpu()
        return bound[: batch.num_reqs].numpy().astype(np.int64)

    def _longest(
        self, batch: CommonAttentionMetadata, rule: RowRule, bound: npt.NDArray[np.int32] | None
    ) -> int:
        """Most tokens a row of the batch can see."""
        return min(self._most_visible, rule.longest(batch.max_seq_len, bound))


def upper_bound(batch: CommonAttentionMetadata) -> npt.NDArray[np.int32] | None:
    """`[R]` tokens that requests have stored at most, None where the host does not know."""
    bound = batch.seq_lens_cpu_upper_bound
    return None if bound is None else bound.numpy()[: batch.num_reqs]


def shallow_copy(
    batch: CommonAttentionMetadata, kind: type[CommonAttentionMetadata]
) -> CommonAttentionMetadata:
    """The object alone, as one of `kind`; `copy.copy` takes five times as long for it."""
    made: CommonAttentionMetadata = object.__new__(kind)
    made.__dict__.update(batch.__dict__)
    return made
