"""Paged attention by FlashInfer's kernels, planned from the host index arrays of a KV plan.

FlashInfer plans once per step and runs once per layer. A plan whose rows compute one token each
goes to the decode kernel, any other to the prefill kernel, a latent pool to the MLA kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar_plugin.attention.call import (
    AttentionParams,
    AttentionResult,
    indptrs_of,
    row_kv_lens,
)
from mstar_plugin.attention.plan_in_flight import PlanInFlight
from mstar_plugin.kv.plan import KVPlanOutput, PagedIndptrs

WORKSPACE_BYTES = 256 << 20
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """A captured decode: exactly `num_rows` rows, on at most `max_pages` pages together."""

    num_rows: int
    max_pages: int


class FlashInferAttention:
    """One step's attention; the kernel is planned by the first `run`, which knows the dtype."""

    def __init__(
        self, indptrs: PagedIndptrs, params: AttentionParams, device: torch.device
    ) -> None:
        self._indptrs = indptrs
        self._params = params
        self._device = device
        self._planner: FlashInferPlanner | None = None

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult:
        if self._planner is None:
            self._planner = FlashInferPlanner(self._params, self._device, query.dtype)
            self._planner.plan(self._indptrs)
        return self._planner.run(query, kv_cache)


class FlashInferPlanner:
    """Plans step after step into the same wrappers; `run` serves the layers of the last plan.

    With `graph` only decode steps of that size are planned, into buffers a captured CUDA graph goes
    on reading: capture `run`, then `plan` and replay. `ValueError` for a plan of another size.
    """

    def __init__(
        self,
        params: AttentionParams,
        device: torch.device | str,
        dtype: torch.dtype,
        graph: GraphSize | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"path flashinfer needs float16 or bfloat16, got {dtype}")
        if params.is_latent and params.soft_cap is not None:
            raise NotImplementedError("FlashInfer's MLA kernel has no soft cap: use another path")
        self._params = params
        self._device = torch.device(device)
        self._dtype = dtype
        self._graph = graph
        self._wrappers: dict[str, Any] = {}
        self._planned: Any = None
        self._sees_nothing: Tensor | None = None

    def plan(self, plan: KVPlanOutput | PagedIndptrs) -> None:
        """Plan one step; its copies to the device are issued, not awaited, but those of the plan
        before it are: the host runs one step ahead.
        """
        indptrs = indptrs_of(plan)
        queries = np.diff(indptrs.qo_indptr.numpy())
        is_decode = bool((queries == 1).all())
        kv_lens = row_kv_lens(indptrs, self._params.page_size)
        blind = _blind_queries(queries, kv_lens.numpy(), self._params.causal)
        self._check_graph(indptrs, len(queries), is_decode and blind is None)
        with _last_plan(self._device).replaced_by(self):
            if self._params.is_latent:
                self._plan_latent(indptrs, kv_lens)
            elif is_decode:
                self._plan_decode(indptrs, kv_lens)
            else:
                self._plan_prefill(indptrs, kv_lens, int(queries.max(initial=0)))
        self._sees_nothing = blind

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult:
        """query `[T, Hq, D]`, kv_cache one layer of the pool; both of the planned dtype."""
        if self._planned is None:
            raise RuntimeError("attention must be planned before it runs: call plan first")
        if query.dtype != self._dtype or kv_cache.dtype != self._dtype:
            raise ValueError(
                f"query and kv_cache must be {self._dtype} as planned, "
                f"got {query.dtype} and {kv_cache.dtype}"
            )
        if self._params.is_latent:
            output, lse = self._planned.run(
                query=query, kv_cache=kv_cache, return_lse=True, return_lse_base_on_e=True
            )
        else:
            output, lse = self._planned.run(query, kv_cache, return_lse=True)
            lse = lse * math.log(2.0)
        if self._sees_nothing is not None:
            blind = self._sees_nothing.to(query.device)
            output = output.masked_fill(blind[:, None, None], 0.0)
            lse = lse.masked_fill(blind[:, None], -torch.inf)
        return AttentionResult(output, lse)

    def _plan_prefill(self, indptrs: PagedIndptrs, kv_lens: Tensor, most_queries: int) -> None:
        self._planned = self._wrapper("prefill")
        self._planned.plan(
            *indptrs[:4],
            **self._shape(),
            head_dim_qk=self._params.head_dim,
            causal=self._params.causal,
            seq_lens=kv_lens,
            max_token_per_sequence=most_queries,
        )

    def _plan_decode(self, indptrs: PagedIndptrs, kv_lens: Tensor) -> None:
        self._planned = self._wrapper("decode")
        self._planned.plan(
            *indptrs[1:4], **self._shape(), head_dim=self._params.head_dim, seq_lens=kv_lens
        )

    def _plan_latent(self, indptrs: PagedIndptrs, kv_lens: Tensor) -> None:
        from flashinfer.mla import MLAPlanMetadata

        params = self._params
        self._planned = self._wrapper("mla")
        self._planned.plan(
            metadata=MLAPlanMetadata.csr(
                indptrs.qo_indptr, indptrs.paged_kv_indptr, indptrs.paged_kv_indices, kv_lens
            ),
            num_heads=params.num_qo_heads,
            head_dim_ckv=params.value_dim,
            head_dim_kpe=params.head_dim - params.value_dim,
            page_size=params.page_size,
            causal=params.causal,
            sm_scale=params.score_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            lse_mode="basee",
        )

    def _shape(self) -> dict[str, Any]:
        params = self._params
        return {
            "num_qo_heads": params.num_qo_heads,
            "num_kv_heads": params.num_kv_heads,
            "page_size": params.page_size,
            "sm_scale": params.score_scale,
            "logits_soft_cap": params.soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _check_graph(self, indptrs: PagedIndptrs, num_rows: int, is_decode: bool) -> None:
        if self._graph is None:
            return
        num_pages = len(indptrs.paged_kv_indices)
        if not is_decode or num_rows != self._graph.num_rows or num_pages > self._graph.max_pages:
            raise ValueError(
                f"a captured decode takes exactly {self._graph.num_rows} rows of one query with "
                f"a key to see and at most {self._graph.max_pages} pages, got {num_rows} rows, "
                f"{int(indptrs.qo_indptr[-1])} queries and {num_pages} pages"
            )

    def _wrapper(self, kind: str) -> Any:
        if kind not in self._wrappers:
            make = {"prefill": self._prefill, "decode": self._decode, "mla": self._latent}[kind]
            self._wrappers[kind] = make(_workspace(self._device))
        return self._wrappers[kind]

    def _prefill(self, workspace: Tensor) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def _decode(self, workspace: Tensor) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        group = self._params.num_qo_heads // self._params.num_kv_heads
        buffers: dict[str, Any] = {}
        if self._graph is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._buffer(self._graph.num_rows + 1),
                "paged_kv_indices_buffer": self._buffer(self._graph.max_pages),
                "paged_kv_last_page_len_buffer": self._buffer(self._graph.num_rows),
            }
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=group > 2, **buffers
        )

    def _latent(self, workspace: Tensor) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        buffers: dict[str, Any] = {}
        if self._graph is not None:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr": self._buffer(self._graph.num_rows + 1),
                "kv_indptr": self._buffer(self._graph.num_rows + 1),
                "kv_indices": self._buffer(self._graph.max_pages),
                "kv_len_arr": self._buffer(self._graph.num_rows),
            }
        return BatchMLAPagedAttentionWrapper(workspace, **buffers)

    def _buffer(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.int32, device=self._device)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch memory of the kernels, shared because they run one after another on a stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _last_plan(device: torch.device) -> PlanInFlight:
    return PlanInFlight(device)


def _blind_queries(
    queries: np.typing.NDArray[Any], kv_lens: np.typing.NDArray[Any], causal: bool
) -> Tensor | None:
    """bool `[T]`: queries that see no key, which the kernels leave undefined; None if all see one.

    Example: 3 queries on a row of 1 token, causal -> [True, True, False].
    """
    blind = np.where(causal, np.maximum(queries - kv_lens, 0), np.where(kv_lens == 0, queries, 0))
    if not blind.any():
        return None
    first = np.repeat(queries.cumsum() - queries, queries)
    return torch.from_numpy(np.arange(len(first)) - first < np.repeat(blind, queries))
