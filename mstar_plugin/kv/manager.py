"""The paged KV resource: admits, plans and commits steps over the streams of many requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mstar_plugin.kv import lifecycle, offload, publish, sharing
from mstar_plugin.kv.cache import KVCache
from mstar_plugin.kv.config import KVReqConfig, KVSpec, KVStep, PagedKVConfig
from mstar_plugin.kv.forward import ForwardCursor
from mstar_plugin.kv.offload import HostPool
from mstar_plugin.kv.pages import PagePool
from mstar_plugin.kv.plan import KVPlanOutputs
from mstar_plugin.kv.prefix import PrefixIndex, cache_root
from mstar_plugin.kv.publish import PublishedKV
from mstar_plugin.kv.request import DEFAULT_LABEL
from mstar_plugin.kv.reservation import AdmissionPolicy, reservation_of
from mstar_plugin.kv.state import KVState
from mstar_plugin.kv.steps import StepLane
from mstar_plugin.kv.streams import NULL_ROW, OFFLOADED, Stream
from mstar_plugin.spec import NodeResourceSpec, Resource, ResourceReqConfig
from mstar_plugin.step import ADMIT_OK, AdmitOutcome, ResourceStep, StepContext

F = TypeVar("F", bound=Callable[..., Any])


def _locked(method: F) -> F:
    @wraps(method)
    def holding(self: KVManager, *args: Any, **kwargs: Any) -> Any:
        with self._state.lock:
            return method(self, *args, **kwargs)

    return cast(F, holding)


class KVManager(Resource):
    """Streams of K and V in fixed-size pages.

    Every admitted step must end in `commit`, `rollback_admit` or, for one admitted ahead of time,
    `clear_preplan`: until then its streams cannot move and pages of streams removed meanwhile are
    held back. All methods may be called from any thread; copies to and from the host pool run
    outside the lock.
    """

    def __init__(
        self,
        config: PagedKVConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        world_size: int = 1,
        model_identity: str = "",
        admission: AdmissionPolicy | str | None = None,
        padding_pages: int = 0,
    ) -> None:
        """`admission` reserves for whole requests by their layouts, of all but `padding_pages`."""
        config.shard(world_size)
        device = torch.device(device)
        cache = KVCache(config, device, dtype)
        pool = PagePool(config.max_num_pages)
        shares = config.prefix_cache and (world_size == 1 or config.prefix_cache_tp)
        self.config = config
        self.cache = cache
        self.world_size = world_size
        self._state = KVState(
            config=config,
            cache=cache,
            pool=pool,
            index=PrefixIndex(pool) if shares else None,
            root=_root(config, dtype, world_size, model_identity),
            host=HostPool(cache, config.cpu_offload_pages) if config.cpu_offload_pages else None,
            gate=None,
        )
        if admission is not None:
            self._state.open_gate(AdmissionPolicy(admission), padding_pages)
        self._forward = ForwardCursor(cache)
        self._steps = StepLane(self._state, self._forward)

    @classmethod
    def build(cls, spec: NodeResourceSpec, **engine_kwargs: Any) -> KVManager:
        """The manager of a paged `KVSpec`; keywords as for the class. `TypeError` for another."""
        config = spec.config if isinstance(spec, KVSpec) else None
        if not isinstance(config, PagedKVConfig):
            raise TypeError(
                f"KVManager is built from a KVSpec with a PagedKVConfig, resource "
                f"{spec.resource_key!r} has {type(config or spec).__name__}"
            )
        return cls(config, **engine_kwargs)

    @property
    def supports_preplan(self) -> bool:
        return True

    @property
    def supports_eviction(self) -> bool:
        """Whether requests can be moved to host memory."""
        return self._state.host is not None

    @property
    def num_free_pages(self) -> int:
        return self._state.pool.num_free

    @_locked
    def ingest_request(self, request_id: str, overrides: ResourceReqConfig | None = None) -> None:
        """Make the request known and open its stream "main"; other labels open on first use.

        `ValueError` (a 400) when its layouts cannot fit `max_seq_len`.
        """
        state = self._state
        if request_id in state.requests:
            return
        config = overrides if isinstance(overrides, KVReqConfig) else KVReqConfig()
        config.validate(KVSpec("kv", set(), self.config))
        state.requests[request_id] = config
        reservation = reservation_of(config, self.config.page_size)
        if state.gate is not None and reservation is not None:
            state.gate.enqueue(request_id, reservation)
        self._open(request_id, DEFAULT_LABEL)

    @_locked
    def remove_request(self, request_id: str) -> None:
        state = self._state
        self._clear_preplan_of(request_id)
        for stream in state.table.of_request(request_id):
            lifecycle.remove(state, stream)
        state.table.rows.pop(request_id, None)
        state.requests.pop(request_id, None)
        if state.gate is not None:
            state.gate.leave(request_id)

    @_locked
    def reset_request(self, request_id: str, free: bool = False) -> None:
        """Empty every stream; pages are kept for reuse unless `free`, or unless one is shared."""
        self._require(request_id)
        self._clear_preplan_of(request_id)
        for stream in self._state.table.of_request(request_id):
            lifecycle.reset(self._state, stream, free)

    @_locked
    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Reserve the pages of a step, all or nothing; admitting it again changes nothing.

        `RuntimeError` when a step is admitted ahead of time (`ctx.is_preplan`) while one of its
        streams still has a step that is not committed.
        """
        return self._steps.admit(step, ctx)

    @_locked
    def rollback_admit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Give back exactly the pages that admitting this step took, from the tail."""
        self._steps.rollback(step, ctx)

    @_locked
    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlanOutputs:
        """The plan of an admitted step by plan label; pre-forks are copied first.

        With `ctx.is_preplan` the forks are only foreseen; they are copied when the same step is
        planned for good. `RuntimeError` for a step that is not admitted.
        """
        return self._steps.plan(step, ctx)

    @_locked
    def clear_preplan(self) -> None:
        """Drop the step admitted ahead of time; pages it took stay with their streams."""
        self._steps.clear_ahead()

    @_locked
    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Keep what the forward wrote (`step.commit`), release what policies say, make post-forks.

        `ValueError` for a policy that does not fit its stream: nothing is committed, the request
        has to be removed, and the step committed again for the others.
        """
        self._steps.commit(step, ctx)

    @_locked
    def release(
        self, request_id: str, label: str, num_tokens: int, protected_prefix: int = 0
    ) -> int:
        """Release the oldest tokens behind a prefix, in whole pages; returns the tokens released.

        Example, S=8: 24 tokens behind a prefix of 16 on 10 pages keep pages 0, 1 and 5 to 9.
        `ValueError` for a prefix outside the stream or not the one of before; `RuntimeError` while
        the request is in a step, offloaded or being read.
        """
        stream = self._stream(request_id, label)
        for other in self._state.table.of_request(request_id):
            lifecycle.require_at_rest(self._state, other)
        return lifecycle.release_tokens(self._state, stream, num_tokens, protected_prefix)

    @_locked
    def has_room(self, request_id: str, node: str, walk: str, num_tokens: int) -> bool:
        """Whether the labels of a walk could each take `num_tokens` more now; True if unknown."""
        state = self._state
        config = state.requests.get(request_id)
        if config is None:
            return True
        rows = state.table.rows[request_id]
        needed = 0
        for label in config.get_labels(node, walk):
            row = rows.get(label, NULL_ROW)
            end = int(state.table.stored[row]) + num_tokens
            needed += max(0, -(-end // self.config.page_size) - int(state.table.num_pages[row]))
        return needed <= state.pool.num_free + state.pool.num_idle_sealed

    @_locked
    def resolve_cached_prefix(self, request_id: str, label: str = DEFAULT_LABEL) -> int:
        """Leading tokens of a new stream that are cached; they are held for it until its first
        step.

        Declare that step for the tokens behind them. Asking again gives the same number.
        """
        stream = self._state.table.get(request_id, label)
        return sharing.lease_prefix(self._state, stream or self._open(request_id, label))

    @_locked
    def apply_cached_prefix(self, request_id: str, label: str, num_tokens: int) -> int:
        """Cut the held prefix to what all ranks have in common; returns the tokens still held."""
        return sharing.trim_lease(self._state, self._stream(request_id, label), num_tokens)

    @_locked
    def extend_prefix(self, request_id: str, label: str, token_ids: Sequence[int]) -> None:
        """Name sampled ids, in order, before the step that writes them is committed.

        `ValueError` for a label that `prefix_decode` of the request does not list.
        """
        stream = self._stream(request_id, label)
        if label not in (self._state.requests[request_id].prefix_decode or {}):
            raise ValueError(f"{stream} must be listed in prefix_decode to be keyed while decoding")
        sharing.extend_chain(self._state, stream, token_ids)

    @_locked
    def clear_prefix_cache(self) -> int:
        """Forget every cached page, as after new weights; returns the pages that became free."""
        return 0 if self._state.index is None else self._state.index.clear()

    @_locked
    def publish(
        self, request_id: str, node: str | None, walk: str | None, step: KVStep | None = None
    ) -> PublishedKV | None:
        """What another manager may take over after a step of (`node`, `walk`), None for nothing.

        Streams that `step` sank are left out.
        """
        return self._publish(request_id, node, walk, frozenset() if step is None else step.sink)

    @_locked
    def publish_after_stop(
        self, request_id: str, node: str | None, walk: str | None
    ) -> PublishedKV | None:
        """What is handed on once the request has stopped, None for nothing."""
        return self._publish(request_id, node, walk, frozenset(), final=True)

    def admit_retrieve(self, request_id: str, published: PublishedKV | None) -> AdmitOutcome:
        """Take over what another manager published, all labels or none; None has nothing to do.

        `AllocationFailed` and `RequestOffloading` can be retried; another world size, other pages
        or a publication that is out of date cannot.
        """
        if published is None:
            return ADMIT_OK
        reason = publish.retrieve(self._state, request_id, published, self.world_size)
        return ADMIT_OK if reason is None else AdmitOutcome(ok=False, ready=False, reason=reason)

    def offload(self, request_id: str) -> int:
        """Move all labels of a request to the host; returns device pages freed, 0 if it cannot."""
        return offload.offload(self._state, request_id)

    def reload(self, request_id: str) -> bool:
        """Bring a request back to the device; False when there is no room yet."""
        return offload.reload(self._state, request_id)

    @_locked
    def is_offloaded(self, request_id: str) -> bool:
        table = self._state.table
        return any(table.has(stream, OFFLOADED) for stream in table.of_request(request_id))

    @_locked
    def get_offload_priority(self, request_id: str) -> float:
        """Device pages that offloading the request would free now: the more, the sooner."""
        return float(offload.offload_gain(self._state, request_id))

    def build_cuda_graph_buffers(self, max_num_tokens: int) -> None:
        """Keep the write rows of each slot and label at one address, for up to that many tokens."""
        self._forward.reserve_tokens(max_num_tokens)

    def set_layer(self, layer: int) -> None:
        """The layer that `write_kv` and `read_kv` use when none is named."""
        self._forward.layer = layer

    def set_label(self, label: str) -> None:
        """The plan label used when none is named; planning sets it to the first."""
        self._forward.label = label

    def write_kv(
        self, k: Tensor, v: Tensor | None, *, layer: int | None = None, label: str | None = None
    ) -> None:
        """Write the planned step's `k` and `v` `[tokens, kv_heads, head_dim]` in packed order.

        MLA: `k` `[tokens, latent_dim]` and no `v`. Rows past the planned tokens go to the sink.
        """
        self._forward.write(k, v, layer, label)

    def read_kv(
        self, *, layer: int | None = None, label: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """K and V of all rows of the planned step, `kv_lens` tokens each, one after the other."""
        return self._forward.read(layer, label)

    def layer_view(self, layer: int) -> Tensor:
        """The pages of a layer: `[pages, 2, S, kv_heads, head_dim]`, MLA `[pages, S, latent]`."""
        return self.cache.layer(layer)

    @_locked
    def read_stream(self, request_id: str, label: str, layer: int) -> tuple[Tensor, Tensor | None]:
        """K and V of the committed tokens of one stream that is on the device."""
        row = self._stream(request_id, label).row
        stored = int(self._state.table.stored[row])
        positions = torch.arange(stored)
        pages = torch.tensor(self._state.table.page_list(row), dtype=torch.int64)
        size = self.config.page_size
        rows = pages[positions // size] * size + positions % size
        return self.cache.read(layer, rows.to(self.cache.data.device))

    @_locked
    def stored_tokens(self, request_id: str, label: str = DEFAULT_LABEL) -> int:
        """Committed tokens of a stream that are resident."""
        return int(self._state.table.stored[self._stream(request_id, label).row])

    @_locked
    def released_tokens(self, request_id: str, label: str = DEFAULT_LABEL) -> int:
        """Committed tokens of a stream that were released since its last reset."""
        return int(self._state.table.released[self._stream(request_id, label).row])

    @_locked
    def assert_pages_conserved(self) -> None:
        """`AssertionError` unless every page is free, owned as often as it is referenced, or the
        sink.
        """
        self._state.assert_conserved()

    def _publish(
        self,
        request_id: str,
        node: str | None,
        walk: str | None,
        sunk: frozenset[tuple[str, str]],
        final: bool = False,
    ) -> PublishedKV | None:
        self._require(request_id)
        available = [
            label for label in self._state.table.rows[request_id] if (request_id, label) not in sunk
        ]
        config = self._state.requests[request_id]
        labels = config.get_publish_labels(node, walk, available, final=final)
        wanted = [label for label in labels if label in available]
        return publish.snapshot(self._state, request_id, wanted, self.world_size)

    def _open(self, request_id: str, label: str) -> Stream:
        self._require(request_id)
        stream = self._state.table.open(request_id, label)
        sharing.start_chain(self._state, stream)
        return stream

    def _require(self, request_id: str) -> None:
        if request_id not in self._state.requests:
            raise KeyError(f"request {request_id!r} is not known: ingest it first")

    def _stream(self, request_id: str, label: str) -> Stream:
        self._require(request_id)
        stream = self._state.table.get(request_id, label)
        if stream is None:
            known = sorted(self._state.table.rows[request_id])
            raise KeyError(f"request {request_id!r} has the labels {known}, not {label!r}")
        return stream

    def _clear_preplan_of(self, request_id: str) -> None:
        staged = self._state.staged
        if staged is not None:
            rows = self._state.table.rows.get(request_id, {}).values()
            if set(rows) & set(staged.touched_rows().tolist()):
                self.clear_preplan()


def _root(config: PagedKVConfig, dtype: torch.dtype, world_size: int, identity: str) -> bytes:
    geometry = (config.num_layers, config.num_kv_heads, config.head_dim, config.page_size)
    return cache_root(
        identity,
        config.layout.value,
        *map(str, geometry),
        str(dtype),
        str(world_size),
        config.prefix_cache_salt,
    )
