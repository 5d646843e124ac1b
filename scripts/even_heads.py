"""A Llama model with an odd number of KV heads as the same function with twice as many.

    python scripts/even_heads.py SOURCE TARGET

Two cards cannot share 9 query heads in 3 groups. Each KV head is written twice, each copy with half
of the group's query heads, rounded up; a query head that is added has weights of zero behind it, so
that what it attends to counts for nothing. Heads and groups are then even, answers the same.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch


def widened(config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with twice the KV heads; `config` is changed to match.

    ValueError for a model with biases in its attention, which would need the same.
    """
    if getattr(config, "attention_bias", False):
        raise ValueError("a model's heads are made even without attention_bias, got true")
    size = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    half = -(-group // 2)
    made = {}
    for name, weight in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.view(-1, size, weight.shape[1])
            weight = heads.repeat_interleave(2, 0).flatten(0, 1)
        elif name.endswith("q_proj.weight"):
            heads = weight.view(-1, group, size, weight.shape[1])
            weight = padded(heads, 1, 2 * half).flatten(0, 2)
        elif name.endswith("o_proj.weight"):
            heads = weight.view(weight.shape[0], -1, group, size)
            weight = padded(heads, 2, 2 * half).flatten(1, 3)
        made[name] = weight.contiguous()
    config.num_key_value_heads *= 2
    config.num_attention_heads = config.num_key_value_heads * half
    return made


def padded(heads: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """With zeros up to `count` along `dim`."""
    shape = list(heads.shape)
    shape[dim] = count - shape[dim]
    return torch.cat([heads, heads.new_zeros(shape)], dim)


def build(source: Path, target: Path) -> Path:
    """Write the model into `target`, which is returned."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    made = widened(config, load_file(source / "model.safetensors"))
    shutil.copytree(source, target, dirs_exist_ok=True)
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    paths = parser.parse_args()
    print(build(paths.source, paths.target))


if __name__ == "__main__":
    main()
