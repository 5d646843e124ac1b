"""The fields of vLLM's batch that the transforms work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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


def batch_of(query_lens: list[int], seq_lens: list[int], block: int) -> Batch:
    """A batch whose table entry names its request and logical block: `1000 * request + block`."""
    width = max(-(-max(seq_lens) // block), 1) + 2
    starts = torch.tensor(np.concatenate([[0], np.cumsum(query_lens)]), dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    table = 1000 * torch.arange(len(seq_lens))[:, None] + torch.arange(width)
    return Batch(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=len(seq_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.to(torch.int32),
        is_prefilling=torch.tensor([q > 1 for q in query_lens]),
    )
