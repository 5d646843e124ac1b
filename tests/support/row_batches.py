"""The fields of vLLM's batch that the transforms work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """The fields of vLLM's batch that the transform reads and writes."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    is_prefilling: torch.Tensor
    causal: Any = True
    _num_computed_tokens_cache: Any = None
    _token_to_req_indices_cache: Any = None

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)
