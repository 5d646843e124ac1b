"""Batches as a model runner hands them to a metadata builder, where the kernels can run: on the
card, or in Triton's interpreter, which `TRITON_INTERPRET=1` asks for before Triton is imported.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
HAS_CARD = torch.cuda.is_available()
if not HAS_CARD and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a card test_interpreted_kernels.py runs it", allow_module_level=True)

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
RUNS_KERNELS = [pytest.mark.gpu] if HAS_CARD else []
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
