"""Batches as a model runner hands them to a metadata builder, on any device."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

MAX_LEN = 400


def batch_on(
    device: torch.device,
    query_lens: list[int],
    seq_lens: list[int],
    block: int,
    *,
    padding: int = 0,
    upper: list[int] | None = None,
) -> CommonAttentionMetadata:
    """A batch whose table entry names its request and logical block; padding rows hold nothing."""
    query_lens, seq_lens = query_lens + [0] * padding, seq_lens + [0] * padding
    bound = seq_lens if upper is None else upper + [0] * padding
    starts = torch.tensor(np.append(0, np.cumsum(query_lens)), dtype=torch.int32)
    width = -(-MAX_LEN // block)
    table = 1000 * torch.arange(len(seq_lens))[:, None] + torch.arange(width)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=torch.tensor(bound, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(bound),
        block_table_tensor=table.to(device=device, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=device),
    )
