"""Paged attention by a named path. A path that cannot serve a call refuses it; none stands in for
another.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from mstar_plugin.attention.call import (
    AttentionParams,
    AttentionResult,
    PlannedAttention,
    check_tensors,
    indptrs_of,
)
from mstar_plugin.kv.plan import KVPlanOutput, PagedIndptrs


class AttentionPath(Enum):
    """`REFERENCE` is the specification, for tests; `CPU` and `FLASHINFER` are the fast paths."""

    REFERENCE = "reference"
    CPU = "cpu"
    FLASHINFER = "flashinfer"


def attend(
    query: Tensor,
    kv_cache: Tensor,
    plan: KVPlanOutput | PagedIndptrs,
    params: AttentionParams,
    path: AttentionPath | str,
) -> AttentionResult:
    """Attention of one layer: query `[T, Hq, D]` in the plan's order over the pages of `kv_cache`.

    kv_cache is one layer of the pool, `[N, 2, S, Hk, D]` or under MLA `[N, S, D]`, and holds the
    step's own tokens already. `ValueError` names the argument that does not fit. For several layers
    of a step use `plan_attention`, which does the index work once.
    """
    return plan_attention(plan, params, path, query.device).run(query, kv_cache)


def plan_attention(
    plan: KVPlanOutput | PagedIndptrs,
    params: AttentionParams,
    path: AttentionPath | str,
    device: torch.device | str = "cpu",
) -> PlannedAttention:
    """The attention of one planned step on `device`; `run(query, kv_cache)` serves each layer."""
    chosen = _path_named(path)
    indptrs = indptrs_of(plan)
    device = torch.device(device)
    num_tokens = int(indptrs.qo_indptr[-1])
    return _Checked(_implementation(chosen, indptrs, params, device), num_tokens, params)


class _Checked:
    def __init__(
        self, implementation: PlannedAttention, num_tokens: int, params: AttentionParams
    ) -> None:
        self._implementation = implementation
        self._num_tokens = num_tokens
        self._params = params

    def run(self, query: Tensor, kv_cache: Tensor) -> AttentionResult:
        check_tensors(query, kv_cache, self._num_tokens, self._params)
        return self._implementation.run(query, kv_cache)


def _path_named(path: AttentionPath | str) -> AttentionPath:
    try:
        return AttentionPath(path)
    except ValueError:
        names = ", ".join(known.value for known in AttentionPath)
        raise ValueError(f"path must be one of {names}, got {path!r}") from None


def _implementation(
    path: AttentionPath, indptrs: PagedIndptrs, params: AttentionParams, device: torch.device
) -> PlannedAttention:
    if path is AttentionPath.REFERENCE:
        from mstar_plugin.attention.reference import ReferenceAttention

        return ReferenceAttention(indptrs, params)
    if path is AttentionPath.CPU:
        if device.type != "cpu":
            raise ValueError(f"path cpu needs tensors on the CPU, got {device}: use flashinfer")
        from mstar_plugin.attention.cpu import CpuAttention

        return CpuAttention(indptrs, params)
    if device.type != "cuda":
        raise ValueError(f"path flashinfer needs tensors on a CUDA device, got {device}: use cpu")
    from mstar_plugin.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(indptrs, params, device)
