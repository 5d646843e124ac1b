"""Rotary embedding by complex numbers."""

from __future__ import annotations

import torch

from mstar_plugin.model_kv import Rotary


def turned(keys: torch.Tensor, rotary: Rotary, angles: torch.Tensor) -> torch.Tensor:
    """keys: `[..., head size]`; angles: `[rotary_dim / 2]` radians; in float64."""
    dim = rotary.rotary_dim
    part = keys[..., :dim].double()
    pairs = (
        part.unflatten(-1, (dim // 2, 2))
        if rotary.interleaved
        else part.unflatten(-1, (2, dim // 2)).transpose(-1, -2)
    )
    spun = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    flat = spun if rotary.interleaved else spun.transpose(-1, -2)
    return torch.cat([flat.flatten(-2), keys[..., dim:].double()], dim=-1)
