"""A tiny frame decoder with random weights: `python scripts/frame_model.py [FOLDER]`.

A frame is 4 by 4 tokens out of 256. Of four layers, three see the last 4 frames and one sees 4
frames that lie 4 apart; `config.json` says so in its `mstar` block. The tokenizer writes a token as
its number.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models" / "tiny" / "frame-decoder"
SEED = 1
HIDDEN = 64
TOKENS_PER_FRAME = 16
VOCABULARY = 256
NEAR = {"ring_buckets": 4, "pinned_dilation": 1}
FAR = {"ring_buckets": 4, "pinned_dilation": 4}
CONFIG: dict[str, Any] = {
    "architectures": ["FrameDecoderForCausalLM"],
    "mstar": {"ring": {"tokens_per_frame": TOKENS_PER_FRAME, "layers": [NEAR, FAR, NEAR, NEAR]}},
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1 << 17,
    # With this deviation queries and keys of normed inputs have a variance above one.
    "initializer_range": 1.2 / HIDDEN**0.5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(folder: Path = FOLDER) -> Path:
    """Write the model into `folder`, which is returned."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**CONFIG)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    # Saving has named the class that saved, not the one that serves.
    config.architectures = CONFIG["architectures"]
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    words = {str(token): token for token in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
