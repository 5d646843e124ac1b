"""The oracle: Hugging Face models in float32 with the explicit mask of the retention rule.

A line on standard input is a JSON list of jobs, a line on standard output that begins with "judged"
the JSON list of their results. A job: {"model", "tokens", "start", "page", "policy"}; the policy is
[budget, prefix], [budget, prefix, "rolling"] or null. A result, for each token from `start` on: the
model's own choice at that place, that choice's margin over the runner-up and the token's
log-probability.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from mstar_plugin.kv.retention import protected_pages, released_pages, visible_positions

# Attention modules whose rotary pairs are neighbouring elements.
INTERLEAVED = ("Cohere", "Glm")


@lru_cache(maxsize=2)
def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def visible(length: int, policy: list[Any] | None, page: int) -> torch.Tensor:
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


@contextmanager
def rolling_attention(model: Any, policy: list[Any] | None, page: int) -> Iterator[None]:
    """Attention in which each pair of a query and a protected key has the distance of the rule.

    Queries are turned back by what was released for them before they meet the protected keys.
    """
    if policy is None or policy[2:] != ["rolling"]:
        yield
        return
    from transformers import AttentionInterface

    text = model.config.get_text_config()
    head = protected_pages(policy[1], page) * page
    attend = partial(rolling_scores, rotary=rotary_of(model), policy=policy, page=page, head=head)
    AttentionInterface.register("rolling", attend)
    before, text._attn_implementation = text._attn_implementation, "rolling"
    try:
        yield
    finally:
        text._attn_implementation = before


def rotary_of(model: Any) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("rotary_emb"))


def rolling_scores(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    rotary: Any,
    policy: list[Any],
    page: int,
    head: int,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    length = query.shape[2]
    released = [released_pages(n, policy[0], policy[1], page) * page for n in range(length)]
    scores = query @ key.transpose(-1, -2)
    if getattr(module, "use_rope", True) and not getattr(module, "is_sliding", False):
        turned = turn_back(query, torch.tensor(released), rotary, module)
        scores[..., :head] = turned @ key[..., :head, :].transpose(-1, -2)
    scores = scores * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = (scores + attention_mask).softmax(-1) @ value
    return seen.transpose(1, 2).contiguous(), None


def turn_back(query: torch.Tensor, turns: torch.Tensor, rotary: Any, module: Any) -> torch.Tensor:
    """`query`, `[1, heads, length, head_dim]`, as if each had stood `turns` tokens earlier."""
    frequencies = getattr(rotary, "inv_freq", None)
    if frequencies is None:
        frequencies = rotary.full_attention_inv_freq
    angles = -turns[:, None] * frequencies
    dim = 2 * angles.shape[1]
    part, rest = query[..., :dim], query[..., dim:]
    if type(module).__name__.startswith(INTERLEAVED):
        first, second = part[..., 0::2], part[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        both = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([both.flatten(-2), rest], dim=-1)
    first, second = part.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([both, rest], dim=-1)


@torch.no_grad()
def judge(job: dict[str, Any]) -> list[list[float]]:
    model, policy, page = load(job["model"]), job["policy"], job["page"]
    tokens = torch.tensor([job["tokens"]])
    length = tokens.shape[1]
    mask = masks(model, visible(length, policy, page))
    with rolling_attention(model, policy, page):
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


def main() -> None:
    for line in sys.stdin:
        print("judged", json.dumps([judge(job) for job in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
