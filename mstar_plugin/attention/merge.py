"""Attention over two disjoint sets of keys, computed apart and merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mstar_plugin.attention.api import AttentionPath, attend
from mstar_plugin.attention.call import AttentionParams, AttentionResult
from mstar_plugin.kv.plan import (
    PagedIndptrs,
    SequenceView,
    build_paged_indptrs,
    context_only_views,
)


def merge(first: AttentionResult, second: AttentionResult) -> AttentionResult:
    """The attention over both sets of keys, from the result over each.

    Each output counts by its share of the exponentiated scores, in float32; one that saw nothing
    counts nothing.
    Example: equal lse l -> the mean of the outputs, lse l + ln 2.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    output = sum(
        part.output.float() * torch.exp(part.lse - base).unsqueeze(-1) for part in (first, second)
    )
    assert isinstance(output, Tensor), "a sum of two tensors"
    return AttentionResult(output.to(first.output.dtype), lse)


def attend_context_and_new(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    kv_cache: Tensor,
    views: Sequence[SequenceView],
    params: AttentionParams,
    path: AttentionPath | str,
) -> AttentionResult:
    """Attention over the stored context and over new tokens that are in no page.

    query `[T, Hq, D]` and new_keys, new_values `[T, Hk, D]` are packed in the order of `views`,
    each row with `to_compute` tokens; the pages are read for the `length - to_compute` tokens
    before them. The context is visible to every query; `params.causal` is about the new tokens
    among themselves. NHD only. A step that is not to be committed needs no page for what it
    computes.
    """
    if params.is_latent:
        raise NotImplementedError(
            "attention over context and new tokens needs layout NHD, MLA has no separate values"
        )
    spans = [view.to_compute for view in views]
    context = context_only_views(views, spans, params.page_size)
    indptrs = build_paged_indptrs(context, params.page_size)
    stored = attend(query, kv_cache, indptrs, replace(params, causal=False), path)
    packed = torch.stack((new_keys, new_values), dim=1).unsqueeze(2)
    alone = attend(query, packed, _each_token_a_page(spans), replace(params, page_size=1), path)
    return merge(stored, alone)


def _each_token_a_page(spans: Sequence[int]) -> PagedIndptrs:
    offsets = torch.tensor([0, *spans]).cumsum(0).to(torch.int32)
    lens = torch.tensor(spans, dtype=torch.int32)
    pages = torch.arange(sum(spans), dtype=torch.int32)
    return PagedIndptrs(offsets, offsets, pages, lens.clamp(max=1), lens)
