"""A Hugging Face causal model whose attention runs over the pages of a `KVManager`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mstar_plugin import KVStep, PagedKVConfig, Segment, StepContext
from mstar_plugin.attention import AttentionParams, PlannedAttention, plan_attention
from mstar_plugin.kv.manager import KVManager

Stream = tuple[str, str]


def attend_over_pages(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    manager: KVManager,
    planned: PlannedAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer of one step: K and V `[1, heads, tokens, head_dim]` go into the pages first."""
    manager.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), layer=module.layer_idx)
    result = planned.run(query[0].transpose(0, 1), manager.layer_view(module.layer_idx))
    return result.output[None], None


AttentionInterface.register("mstar_pages", attend_over_pages)
logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class PagedModel:
    """Model, tokenizer and cache; float32 on the CPU."""

    def __init__(self, folder: str, *, max_num_pages: int, page_size: int = 16) -> None:
        if not Path(folder).exists():
            raise SystemExit(f"model folder {folder!r} is not here: run `make model`")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="mstar_pages"
        )
        config = self.model.config
        self.kv_config = PagedKVConfig(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            num_qo_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_seq_len=config.max_position_embeddings,
            max_num_pages=max_num_pages,
            page_size=page_size,
        )
        self.manager = KVManager(self.kv_config)
        self.params = AttentionParams.from_config(self.kv_config)

    def step(self, tokens: Mapping[Stream, Sequence[int]], **declared: Any) -> dict[Stream, Tensor]:
        """Run one step over some streams; returns the logits behind each one's last token.

        `declared` goes to the `KVStep`. `RuntimeError` with the manager's reason when the step is
        not admitted.
        """
        step = KVStep(tuple(Segment(*name, len(ids)) for name, ids in tokens.items()), **declared)
        ctx = StepContext(request_ids=list(dict.fromkeys(name[0] for name in tokens)))
        outcome = self.manager.admit(step, ctx)
        if outcome.reason is not None:
            raise RuntimeError(outcome.reason.message)
        logits: dict[Stream, Tensor] = {}
        for label, output in self.manager.plan(step, ctx).items():
            self.manager.set_label(label)
            streams = [(view.request_id, view.label) for view in output.views]
            planned = plan_attention(output, self.params, "cpu")
            rows = [(stream, tokens[stream]) for stream in streams]
            logits |= dict(zip(streams, self._forward(rows, planned), strict=True))
        self.manager.commit(step, ctx)
        return logits

    def _forward(
        self, rows: Sequence[tuple[Stream, Sequence[int]]], planned: PlannedAttention
    ) -> Tensor:
        """Logits `[rows, vocabulary]`. Rotary positions count every token ever written."""
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for stream, row in rows:
            first = self.manager.stored_tokens(*stream) + self.manager.released_tokens(*stream)
            positions += range(first, first + len(row))
            ids += row
            last.append(len(ids) - 1)
        with torch.no_grad():
            logits: Tensor = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                logits_to_keep=torch.tensor(last),
                use_cache=False,
                manager=self.manager,
                planned=planned,
            ).logits
        return logits[0]
