"""The oracle of ring servers: Llama in float32 with an explicit mask per layer.

`masked_frames.py JOBS RESULTS`, both JSON files. A job: {"model", "tokens", "start", "frame",
"layers"}; the layers are [buckets, dilation] pairs. A result is that of masked_model.py. The masks
come from a ring that is written frame by frame, not from the closed form.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def load(path: str) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def earlier_frames(num_frames: int, buckets: int, dilation: int) -> list[list[int]]:
    """The earlier frames that each frame sees: what the ring holds as the frame comes, without the
    slot that the frame itself will take.
    """
    ring: list[int | None] = [None] * buckets
    cursor = 0
    seen = []
    for frame in range(num_frames):
        is_kept = frame % dilation == 0
        if is_kept:
            ring[cursor] = None
        seen.append([held for held in ring if held is not None])
        if is_kept:
            ring[cursor] = frame
            cursor = (cursor + 1) % buckets
    return seen


def visible(length: int, frame_tokens: int, buckets: int, dilation: int) -> torch.Tensor:
    """`[1, 1, length, length]` bool: may query i see key j."""
    num_frames = -(-length // frame_tokens)
    mask = torch.zeros(num_frames * frame_tokens, num_frames * frame_tokens, dtype=torch.bool)
    frames = mask.view(num_frames, frame_tokens, num_frames, frame_tokens)
    for frame, held in enumerate(earlier_frames(num_frames, buckets, dilation)):
        frames[frame, :, held] = True
        frames[frame, :, frame] = torch.ones(frame_tokens, frame_tokens, dtype=torch.bool).tril()
    return mask[None, None, :length, :length]


def logits_of(model: Any, tokens: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """`[length, vocabulary]`, layer `i` seeing what `masks[i]` lets it see."""
    hidden = model.model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    for layer, mask in zip(model.model.layers, masks, strict=True):
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden))[0]
    return logits


@torch.no_grad()
def judge(job: dict[str, Any]) -> list[list[float]]:
    tokens = torch.tensor([job["tokens"]])
    length = tokens.shape[1]
    by_geometry = {
        tuple(layer): visible(length, job["frame"], *layer) for layer in map(tuple, job["layers"])
    }
    masks = [by_geometry[tuple(layer)] for layer in job["layers"]]
    scores = logits_of(load(job["model"]), tokens, masks).log_softmax(-1)
    judged = []
    for place in range(job["start"] - 1, length - 1):
        best = scores[place].topk(2)
        margin = float(best.values[0] - best.values[1])
        judged.append([int(best.indices[0]), margin, float(scores[place, tokens[0, place + 1]])])
    return judged


def main(jobs_file: Path, results_file: Path) -> None:
    jobs = json.loads(jobs_file.read_text())
    results_file.write_text(json.dumps([judge(job) for job in jobs]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
