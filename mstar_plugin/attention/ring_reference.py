"""The specification of ring attention: an unbounded history, an explicit mask, float32.

Letters: `Q` query heads, `H` KV heads, `N` frames of history, `T` tokens per frame, `D` head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar_plugin.ring.geometry import visible_frames


def frame_mask(num_frames: int, dilation: int, buckets: int) -> Tensor:
    """bool `[num_frames, num_frames]`: which frames (columns) each frame (row) attends to."""
    mask = torch.eye(num_frames, dtype=torch.bool)
    for frame in range(num_frames):
        mask[frame, list(visible_frames(frame, dilation, buckets))] = True
    return mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of `q` `[Q, M, D]` over `k`, `v` `[H, L, D]` where `mask` bool `[M, L]` is True.

    Query head `i` reads KV head `i // (Q / H)`. Hidden keys and values are replaced before any
    product, so that what they hold, NaN included, cannot reach the result. Returns float32
    `[Q, M, D]`.
    """
    is_seen = mask.any(0)[:, None]
    repeats = q.shape[0] // k.shape[0]
    keys, values = (
        torch.where(is_seen, x.float(), 0.0).repeat_interleave(repeats, 0) for x in (k, v)
    )
    scores = q.float() @ keys.transpose(1, 2) * scale
    weights = torch.softmax(torch.where(mask, scores, -torch.inf), dim=-1)
    return weights @ values


def ring_attention_reference(
    q: Tensor,
    history_k: Tensor,
    history_v: Tensor,
    frame: int,
    dilation: int,
    buckets: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of one frame over everything it may see.

    q: `[Q, T, D]`. history_k, history_v: `[H, N, T, D]`, the frames 0..N-1 with `frame` among them
    in the version that its own pass wrote; `N > frame`. Returns float32 `[Q, T, D]`.
    """
    num_frames, tokens = history_k.shape[1:3]
    seen = torch.zeros(num_frames, dtype=torch.bool)
    seen[[*visible_frames(frame, dilation, buckets), frame]] = True
    mask = seen.repeat_interleave(tokens).expand(q.shape[1], -1)
    k, v = history_k.flatten(1, 2), history_v.flatten(1, 2)
    return masked_attention(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)
