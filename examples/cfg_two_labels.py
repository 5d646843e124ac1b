"""Classifier-free guidance with two labels of one request in one forward.

python examples/cfg_two_labels.py [--model .models/SmolLM2-135M-Instruct] [--tokens 40]

The guided branch ("main") has read the prompt, the other ("uncond") has not; a combined label puts
the tokens of both into one batch. The same text is then scored by the model as Hugging Face runs
it, one branch after the other. Exits with 1 when the logits or a chosen token differ.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from paged_model import PagedModel
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPT = "Write about the sea.\n\nThe sea"
START = "The sea"
GUIDED, FREE = ("text", "main"), ("text", "uncond")
COMBINED = {("main", "uncond"): "_cfg"}
TOLERANCE = 1e-3


def guided(conditional: Tensor, free: Tensor, scale: float) -> Tensor:
    """Away from what the model would say anyway: `free + scale * (conditional - free)`."""
    return free + scale * (conditional - free)


def generate(
    paged: PagedModel, num_tokens: int, scale: float
) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
    """Chosen token ids, and the logits of both branches they were chosen from."""
    paged.manager.ingest_request(GUIDED[0])
    feed = {name: paged.tokenizer(text).input_ids for name, text in prompts().items()}
    chosen: list[int] = []
    seen: list[tuple[Tensor, Tensor]] = []
    while len(chosen) < num_tokens:
        logits = paged.step(feed, combined_labels=COMBINED)
        seen.append((logits[GUIDED], logits[FREE]))
        chosen.append(int(guided(*seen[-1], scale=scale).argmax()))
        feed = {GUIDED: chosen[-1:], FREE: chosen[-1:]}
    paged.manager.assert_pages_conserved()
    return chosen, seen


def prompts() -> dict[tuple[str, str], str]:
    return {GUIDED: PROMPT, FREE: START}


def separate_run(model: Any, prompt: list[int], chosen: list[int]) -> Tensor:
    """Logits `[len(chosen), vocabulary]` of one branch alone, from the unchanged model."""
    ids = torch.tensor([prompt + chosen[:-1]])
    with torch.inference_mode():
        logits: Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1.5)
    options = parser.parse_args()
    paged = PagedModel(options.model, max_num_pages=64)
    chosen, seen = generate(paged, options.tokens, options.scale)
    print(START + paged.tokenizer.decode(chosen) + "\n")
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    alone = [
        separate_run(plain, paged.tokenizer(text).input_ids, chosen) for text in prompts().values()
    ]
    together = [torch.stack(branch) for branch in zip(*seen, strict=True)]
    worst = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    same = guided(alone[0], alone[1], options.scale).argmax(dim=-1).tolist() == chosen
    print(
        f"{len(chosen)} tokens, both branches in one forward per step: logits within {worst:.1e} "
        f"of two separate runs, chosen tokens {'equal' if same else 'DIFFERENT'}"
    )
    return 0 if same and worst < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
