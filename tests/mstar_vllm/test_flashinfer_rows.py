"""What FlashInfer's builder plans rows with: as many as there are rows, not requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("flashinfer", reason="needs the flashinfer package")

from mstar_vllm.backend_flashinfer import (
    MStarFlashInferMetadataBuilder,
    RowPlanBuffers,
)

pytestmark = pytest.mark.vllm


def builder(max_requests: int) -> Any:
    """A builder with what the parent makes of its requests; the rest of it needs a card."""
    made: Any = object.__new__(MStarFlashInferMetadataBuilder)
    made.max_num_reqs, made._decode_mask_cache = max_requests, {}
    made.device, made.enable_cuda_graph = torch.device("cpu"), True
    made._row_buffers = RowPlanBuffers(made.device)
    made._row_buffers.paged_kv_indptr = made._row_buffers.paged_kv_last_page_len = "rows'"
    for name in RowPlanBuffers.NAMES:
        setattr(made, name, "requests'")
    return made


def test_masks_of_drafts_are_made_for_rows_and_forgotten() -> None:
    made = builder(max_requests=1)
    with made._planning_rows(2):
        assert made._get_decode_mask(2, None, 2, True).shape[0] == 2
        assert made.paged_kv_indptr == "rows'" and not made.enable_cuda_graph
    assert made._get_decode_mask(2, None, 1, True).shape[0] == 1
    assert made.paged_kv_indptr == "requests'" and made.enable_cuda_graph
