"""Tiny random-weight models with the shapes on which attention back ends break.

Each is an ordinary model folder in float32 under `.models/tiny/`, the same on every machine, with
SmolLM2's tokenizer, so that a server can load it. The weights are large enough that attention is
far from uniform: a wrong key changes the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models" / "tiny"
TOKENIZER = ROOT / ".models" / "SmolLM2-135M-Instruct"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STAMP_FILE = "recipe.sha256"

SEED = 1
HIDDEN = 64
COMMON: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    # With this deviation queries and keys of normed inputs have a variance above one.
    "initializer_range": 1.2 / HIDDEN**0.5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOW = 48
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
GATED: dict[str, Any] = {"intermediate_size": 128}


def heads(queries: int, keys: int, head_dim: int) -> dict[str, Any]:
    return {
        **GATED,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
    }


# Folder name -> configuration class of transformers, and what differs from COMMON.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Llama's configuration wants a hidden size that the number of heads divides.
    "llama-14-2": ("LlamaConfig", {**heads(14, 2, 64), "hidden_size": 112}),
    "llama-9-3": ("LlamaConfig", {**heads(9, 3, 64), "hidden_size": 72}),
    "llama-5-1": ("LlamaConfig", {**heads(5, 1, 64), "hidden_size": 80}),
    "llama-4-1": ("LlamaConfig", heads(4, 1, 64)),
    "llama-dim80": ("LlamaConfig", heads(4, 2, 80)),
    "llama-dim96": ("LlamaConfig", heads(4, 2, 96)),
    "llama-dim256": ("LlamaConfig", heads(4, 2, 256)),
    "mistral-window": ("MistralConfig", {**heads(4, 2, 64), "sliding_window": WINDOW}),
    # vLLM's Qwen2 has no head_dim of its own: hidden size over heads.
    "qwen2": ("Qwen2Config", {**heads(4, 2, 64), "hidden_size": 256}),
    "qwen3": ("Qwen3Config", heads(4, 2, 64)),
    # transformers applies the cap only with attn_implementation="eager".
    "gemma2-cap1": (
        "Gemma2Config",
        {
            **heads(4, 2, 64),
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_AND_FULL,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-mixed": (
        "Gemma3TextConfig",
        {
            **heads(4, 2, 64),
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "gemma3n-shared": (
        "Gemma3nTextConfig",
        {
            **heads(4, 2, 64),
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 49152,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": SLIDING_AND_FULL * 2,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-shared": (
        "Gemma4TextConfig",
        {
            **heads(4, 2, 64),
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 49152,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": SLIDING_AND_FULL * 2,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss-sinks": (
        "GptOssConfig",
        {
            **heads(4, 2, 64),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_AND_FULL,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "num_attention_heads": 2,
            "ffn_dim": 128,
            "word_embed_proj_dim": HIDDEN,
            "init_std": COMMON["initializer_range"],
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**heads(4, 2, 64), "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **heads(4, 2, 64),
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


def recipe_of(name: str) -> dict[str, Any]:
    if name not in RECIPES:
        raise ValueError(f"name must be one of {', '.join(RECIPES)}, got {name!r}")
    config_class, changes = RECIPES[name]
    return {"config_class": config_class, **COMMON, **changes}


def stamp() -> str:
    """Changes with every edit of this file, whatever it makes of a recipe."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def is_current(folder: Path) -> bool:
    saved = folder / STAMP_FILE
    return saved.exists() and saved.read_text() == stamp()


def flip_signs(norm: Any) -> None:
    """Give half of a norm's outputs the other sign.

    A model whose output embedding is its input embedding would repeat its last token for ever,
    whatever attention says: the flipped signs end that likeness.
    """
    import torch

    weight = norm.weight.data
    flipped = torch.rand_like(weight) < 0.5
    # Gemma 2 and 3 multiply by one plus the weight, the others by the weight.
    weight[flipped] = -2.0 if bool((weight == 0).all()) else -weight[flipped]


def save_model(recipe: dict[str, Any], folder: Path) -> None:
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    values = {key: value for key, value in recipe.items() if key != "config_class"}
    config = getattr(transformers, recipe["config_class"])(**values)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if config.tie_word_embeddings:
            flip_signs(model.model.norm)
    model.save_pretrained(folder)


def build(name: str) -> Path:
    """The folder of the named model, written first where it is missing or this file changed."""
    recipe, final = recipe_of(name), FOLDER / name
    if is_current(final):
        return final
    if not TOKENIZER.exists():
        raise FileNotFoundError(f"{TOKENIZER.name} lends its tokenizer: run `make model` first")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=f".{name}-") as work:
        target = Path(work) / "model"
        save_model(recipe, target)
        for file in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / file, target / file)
        (target / STAMP_FILE).write_text(stamp())
        if final.exists():
            shutil.rmtree(final)
        target.rename(final)
    return final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    for name in parser.parse_args().names or RECIPES:
        print(build(name).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
