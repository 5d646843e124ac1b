"""Attention over protected pages at a distance that stays, on CUDA.

Turning a query back by the released tokens is turning the protected keys forward by them. So the
rows attend twice, to the protected pages with turned queries and to the others with their own, and
both results are merged by their log-sum-exps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton

from mstar_plugin.rotary import inverse_frequencies
from mstar_vllm.device_kernels import turn_back

if TYPE_CHECKING:
    from mstar_plugin.model_kv import Rotary


class QueryTurn:
    """Turns the queries of one layer; `rotary` is None for a layer without positions, whose queries
    are the same at every distance.
    """

    def __init__(self, rotary: Rotary | None, device: torch.device) -> None:
        self._rotary = rotary
        if rotary is not None:
            revolutions = inverse_frequencies(rotary) / (2 * math.pi)
            self._revolutions = torch.from_numpy(revolutions).to(device)

    def back(
        self, queries: torch.Tensor, query_start: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        """Rows' queries as if `turns` tokens earlier; those that turn by 0 are left undefined.

        queries: `[T, heads, head size]`; query_start: `[V + 1]`, turns: `[V]`, int32.
        """
        rotary = self._rotary
        if rotary is None:
            return queries
        out = torch.empty_like(queries)
        _, heads, head_size = queries.shape
        turn_back[(turns.shape[0], heads)](
            queries,
            queries.stride(0),
            queries.stride(1),
            query_start,
            turns,
            self._revolutions,
            out,
            out.stride(0),
            out.stride(1),
            PAIRS=rotary.rotary_dim // 2,
            HEAD_SIZE=head_size,
            INTERLEAVED=rotary.interleaved,
            PAIRS_AT_ONCE=triton.next_power_of_2(rotary.rotary_dim // 2),
            REST_AT_ONCE=triton.next_power_of_2(max(1, head_size - rotary.rotary_dim)),
        )
        return out
