"""The oracle: Hugging Face models in float32 with the explicit mask of the retention rule.

`masked_model.py JOBS RESULTS`, both JSON files. A job: {"model", "tokens", "start", "page",
"policy"}; the policy is [budget, prefix] or null. A result, for each token from `start` on: the
model's own choice at that place, that choice's margin over the runner-up and the token's
log-probability.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mstar_plugin.kv.retention import visible_positions


@cache
def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def visible(length: int, policy: list[int] | None, page: int) -> torch.Tensor:
    """`[length, length]` bool: may query i see key j."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if policy is None:
        return seen
    for query in range(length):
        row = torch.zeros(length, dtype=torch.bool)
        for span in visible_positions(query, policy[0], policy[1], page):
            row[span.start : span.stop] = True
        seen[query] = row
    return seen


def masks(model: Any, seen: torch.Tensor) -> Any:
    """The additive mask the model takes: one tensor, or one per kind of layer."""
    text = model.config.get_text_config()
    full = additive(seen)
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if window is None or not kinds:
        return full
    index = torch.arange(len(seen))
    near = (index[:, None] - index[None, :] < window) & (index[:, None] >= index[None, :])
    return {"full_attention": full, "sliding_attention": additive(near)}


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def judge(job: dict[str, Any]) -> list[list[float]]:
    model = load(job["model"])
    tokens = torch.tensor([job["tokens"]])
    length = tokens.shape[1]
    mask = masks(model, visible(length, job["policy"], job["page"]))
    logits = model(
        tokens, attention_mask=mask, position_ids=torch.arange(length)[None], use_cache=False
    ).logits[0]
    judged = []
    for place in range(job["start"] - 1, length - 1):
        scores = logits[place].log_softmax(-1)
        best = scores.topk(2)
        margin = float(best.values[0] - best.values[1])
        judged.append([int(best.indices[0]), margin, float(scores[tokens[0, place + 1]])])
    return judged


def main(jobs_file: Path, results_file: Path) -> None:
    jobs = json.loads(jobs_file.read_text())
    results_file.write_text(json.dumps([judge(job) for job in jobs]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
