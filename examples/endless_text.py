"""Write far more text than the KV pool has room for, at constant memory.

python examples/endless_text.py [--model .models/SmolLM2-135M-Instruct] [--tokens 600]

Each commit declares a retention policy: the prompt stays, and of what is written behind it the
newest tokens. Prints the text, then how much was written and how much is resident.
"""

from __future__ import annotations

import argparse
import sys

import torch
from paged_model import PagedModel
from torch import Tensor

from mstar_plugin import PrefixSpan, RetentionPolicy, StreamLayout

PROMPT = "Here is a very long story about a lighthouse keeper and the sea.\n\n"
STREAM = ("story", "main")


def sample(logits: Tensor, generator: torch.Generator) -> int:
    """One of the 40 most likely tokens of logits `[vocabulary]`, at temperature 0.9."""
    best = torch.topk(logits, 40)
    weights = torch.softmax(best.values / 0.9, dim=-1)
    return int(best.indices[torch.multinomial(weights, 1, generator=generator)])


def write(paged: PagedModel, num_tokens: int, policy: RetentionPolicy) -> tuple[int, int]:
    """Print a story of `num_tokens`; returns the tokens written and the most pages in use."""
    generator = torch.Generator().manual_seed(7)
    manager, tokenizer = paged.manager, paged.tokenizer
    manager.ingest_request(STREAM[0])
    num_usable = manager.num_free_pages
    feed = tokenizer(PROMPT).input_ids
    most_pages = 0
    for _ in range(num_tokens):
        logits = paged.step({STREAM: feed}, retention={STREAM: policy})[STREAM]
        most_pages = max(most_pages, num_usable - manager.num_free_pages)
        logits[tokenizer.eos_token_id] = -torch.inf
        feed = [sample(logits, generator)]
        print(tokenizer.decode(feed), end="", flush=True)
    manager.assert_pages_conserved()
    return num_tokens, most_pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--context-budget", type=int, default=96)
    parser.add_argument("--max-num-pages", type=int, default=12)
    options = parser.parse_args()
    paged = PagedModel(options.model, max_num_pages=options.max_num_pages)
    length = len(paged.tokenizer(PROMPT).input_ids)
    policy = RetentionPolicy(options.context_budget, protected_prefix=length)
    written, most_pages = write(paged, options.tokens, policy)
    layout = StreamLayout(
        (PrefixSpan(length, length, "prefill"),), (("decode", 1),), retention=policy
    )
    bound = layout.pages({"decode": written}, paged.kv_config.page_size)
    print(
        f"\n\n{written} tokens written, {paged.manager.released_tokens(*STREAM)} released, "
        f"{paged.manager.stored_tokens(*STREAM)} resident; never more than {most_pages} pages "
        f"of {paged.kv_config.page_size} in use, the layout's bound is {bound}"
    )
    return 0 if most_pages <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
