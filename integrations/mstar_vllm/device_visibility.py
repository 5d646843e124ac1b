"""The batch transform on CUDA: planned on the host without waiting for the device, done there.

Rows of batches that a full CUDA graph can replay come out of buffers whose addresses never change;
prefill is cut into rows as in `visibility.py`. Letters in shapes: `R` requests, `V` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import iter_layer_specs

from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_limits import MOST_TOKENS, DeviceBatchLimits, DeviceLimits
from mstar_vllm.device_rows import HeadRows, Pages, RowBuffers, RowPlans, fill_rows
from mstar_vllm.visibility import IntArray, RowLimits, split_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What the batches of a group can be.

    drafts: speculative tokens a request can bring to a step. plans_on_host: whether the parent
    needs exact lengths on the host. most_turned_pages: protected pages a row can see apart.
    """

    pages: Pages
    max_requests: int
    max_model_len: int
    drafts: int
    plans_on_host: bool
    most_turned_pages: int = 0

    @property
    def draft_rows(self) -> int:
        """Rows that a request's token and its drafts can fall into."""
        return 1 + -(-self.drafts // self.pages.page_tokens)


def device_visibility(
    spec: Any, vllm_config: VllmConfig, device: torch.device, plans_on_host: bool
) -> DeviceVisibility | None:
    """The transform of a group's batches; None where its layers were not converted."""
    if not isinstance(spec, RetentionSpec):
        return None
    max_requests = vllm_config.scheduler_config.max_num_seqs
    shape = BatchShape(
        pages=Pages(page_tokens=spec.page_tokens, block_tokens=spec.block_size),
        max_requests=max_requests,
        max_model_len=vllm_config.model_config.max_model_len,
        drafts=vllm_config.num_speculative_tokens,
        plans_on_host=plans_on_host,
        most_turned_pages=spec.turned_pages(spec.policy),
    )
    return DeviceVisibility(shape, DeviceBatchLimits(spec, max_requests, device), device)


def is_bounded(spec: Any) -> bool:
    """Whether the server's own policy holds for the layers of `spec`."""
    return any(
        isinstance(layer, RetentionSpec) and layer.policy is not None
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

    def __init__(self, shape: BatchShape, limits: DeviceBatchLimits, device: torch.device) -> None:
        self._shape = shape
        self._limits = limits
        self._plans = RowPlans(device)
        head_width = shape.pages.blocks(shape.most_turned_pages * shape.pages.page_tokens)
        self._chunks = RowBuffers(0, 0, device, is_fixed=False, head_width=head_width)
        self._draft_plan = self._plans.uniform(shape.max_requests, shape.draft_rows)
        self._most_visible = self._most_under_server()
        has_server = limits.server is not None
        rows = shape.max_requests * shape.draft_rows if has_server else 0
        width = shape.pages.blocks(self._most_visible) if has_server else 0
        self._decode = RowBuffers(rows, width, device, is_fixed=has_server, head_width=head_width)
        self._warm_up()

    def visible(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch as its rows see it; the same object where no request is bounded, or where a
        prefill releases nothing.
        """
        limits = self._limits.current(batch.num_reqs)
        if limits is None:
            return batch
        if batch.max_query_len <= 1:
            return self._visible_decode(batch, limits)
        if self._shape.plans_on_host or batch.max_query_len > 1 + self._shape.drafts:
            return self._visible_chunks(batch, limits)
        return self._visible_drafts(batch, limits)

    def _visible_decode(
        self, batch: CommonAttentionMetadata, limits: DeviceLimits
    ) -> CommonAttentionMetadata:
        longest = self._longest(batch, limits.host)
        seen = self._rows(batch, limits, self._decode, batch.num_reqs, longest, None)
        bound = batch.seq_lens_cpu_upper_bound
        if self._shape.plans_on_host and bound is not None:
            stored = bound.numpy()[: batch.num_reqs]
            seen.seq_lens_cpu_upper_bound = torch.from_numpy(visible_tokens(stored, limits.host))
        return seen

    def _visible_drafts(
        self, batch: CommonAttentionMetadata, limits: DeviceLimits
    ) -> CommonAttentionMetadata:
        """As many rows for every request as drafts can need: the device, which alone knows how many
        were accepted, leaves the others empty, and a graph always finds as many.
        """
        num_rows = batch.num_reqs * self._shape.draft_rows
        longest = self._longest(batch, limits.host)
        return self._rows(
            batch, limits, self._decode, num_rows, longest, self._draft_plan[:, :num_rows]
        )

    def _visible_chunks(
        self, batch: CommonAttentionMetadata, limits: DeviceLimits
    ) -> CommonAttentionMetadata:
        stored = self._stored_on_host(batch)
        if not np.any(stored > limits.host.dense + limits.host.page_tokens):
            return batch
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy()
        query_lens = np.diff(starts).astype(np.int64)
        if self._shape.drafts and not self._shape.plans_on_host:
            request = possible_rows(query_lens, stored, limits.host)
            return self._chunk_rows(batch, limits, request, self._longest(batch, limits.host))
        rows = split_rows(query_lens, stored, limits.host)
        seen = self._chunk_rows(batch, limits, rows.request, int(rows.seq_lens.max()))
        seen.max_query_len = int(rows.query_lens.max())
        ends = np.cumsum(rows.query_lens)
        seen.query_start_loc_cpu = torch.from_numpy(np.append(0, ends).astype(np.int32))
        seen.seq_lens_cpu_upper_bound = torch.from_numpy(rows.seq_lens.astype(np.int32))
        return seen

    def _chunk_rows(
        self,
        batch: CommonAttentionMetadata,
        limits: DeviceLimits,
        request: IntArray,
        longest: int,
    ) -> CommonAttentionMetadata:
        plan = self._plans.of_requests(request)
        return self._rows(batch, limits, self._chunks, len(request), longest, plan)

    def _rows(
        self,
        batch: CommonAttentionMetadata,
        limits: DeviceLimits,
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
        fill_rows(out, batch, limits, self._shape.pages, num_rows, plan)
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
        """Compile what the server's policy will launch, before a request waits for it."""
        limits = self._limits.of_server
        if limits is None:
            return
        tables = self._decode.tables
        batch = EmptyBatch(tables[:1], self._decode.seq_lens[:1], self._decode.query_start[:2])
        for plan in (None, self._plans.of_requests(np.zeros(1, dtype=np.int64))):
            fill_rows(self._decode, batch, limits, self._shape.pages, 1, plan)

    def _stored_on_host(self, batch: CommonAttentionMetadata) -> IntArray:
        """`[R]` stored tokens: an upper bound where drafts make them uncertain, unless the parent
        plans on the host; it waits for the device in that case, as it would without the plugin.
        """
        bound = batch.seq_lens_cpu_upper_bound
        if bound is None or (self._shape.drafts and self._shape.plans_on_host):
            bound = batch.seq_lens.cpu()
        return bound[: batch.num_reqs].numpy().astype(np.int64)

    def _most_under_server(self) -> int:
        """Most tokens a row can see under the server's policy, or a request's tighter one, whose
        prefix may end a page later.
        """
        policy, page = self._limits.server, self._shape.pages.page_tokens
        if policy is None:
            return self._shape.max_model_len
        reach = RowLimits.of_policy(policy, page).reach()
        return min(self._shape.max_model_len, reach + page)

    def _longest(self, batch: CommonAttentionMetadata, limits: RowLimits) -> int:
        """Most tokens a row of the batch can see; one number for all batches of a server policy
        that is in force.
        """
        bound = batch.seq_lens_cpu_upper_bound
        if self._limits.server is not None or bound is None:
            return min(batch.max_seq_len, self._most_visible)
        stored = bound[: batch.num_reqs].numpy()
        return max(1, int(np.minimum(stored, limits.dense + limits.page_tokens).max()))


def shallow_copy(
    batch: CommonAttentionMetadata, kind: type[CommonAttentionMetadata]
) -> CommonAttentionMetadata:
    """The object alone, as one of `kind`; `copy.copy` takes five times as long for it."""
    made: CommonAttentionMetadata = object.__new__(kind)
    made.__dict__.update(batch.__dict__)
    return made


def visible_tokens(stored: npt.NDArray[np.int32], limits: RowLimits) -> npt.NDArray[np.int32]:
    """Tokens that the last of `stored` tokens sees, itself included; 0 of 0.

    Example: page 8, dense 31: 39 of 39, 33 of 41.
    """
    dense = np.minimum(limits.dense, MOST_TOKENS - 1).astype(np.int32)
    released = (stored - (dense + 1)) // limits.page_tokens
    np.maximum(released, 0, out=released)
    visible: npt.NDArray[np.int32] = stored - released * limits.page_tokens
    return visible


def possible_rows(query_lens: IntArray, stored: IntArray, limits: RowLimits) -> IntArray:
    """The request of each row that a batch can need, `stored` being upper bounds.

    Example: page 16, chunks of 17 and 1 tokens, much released -> [0, 0, 1].
    """
    page = limits.page_tokens
    crossings = -(-np.maximum(query_lens - 1, 0) // page)
    most = np.maximum(0, (stored - 1 - limits.dense) // page)
    return np.repeat(np.arange(len(stored)), 1 + np.minimum(crossings, most))
