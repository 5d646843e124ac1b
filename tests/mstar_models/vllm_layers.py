"""Builds the text model of config files with vLLM and prints its attention layers as JSON lines.

A script of its own because vLLM keeps the parallel state of a process for good.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from mstar_plugin.adapters import find_adapter

TEXT_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
SMALL = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 256,
    "ffn_hidden_size": 64,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    architecture = config["architectures"][0]
    if architecture not in TEXT_ARCHITECTURES:
        return {**config, **SMALL}
    text = config.get("text_config") or {**config, "model_type": config["model_type"] + "_text"}
    named = [TEXT_ARCHITECTURES[architecture]]
    return {"tie_word_embeddings": False, **text, **SMALL, "architectures": named}


def compared(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's layers, and whether its configuration object declares what the file does."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        options = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
        )
        vllm_config = options.create_engine_config()
        adapter = find_adapter(vllm_config.model_config.architectures)
        assert adapter is not None, vllm_config.model_config.architectures
        # Before the model is built: DeepSeek's renames the rotary scheme in its configuration.
        read_by_vllm = adapter.declare(vllm_config.model_config.hf_config)
        model = built_model(vllm_config, config)
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = vllm_config.compilation_config.static_forward_context
    rows = [
        layer_row(name, layer, modules)
        for name, layer in layers.items()
        if getattr(layer, "head_size", None) is not None
    ]
    return {"layers": rows, "is_read_alike": read_by_vllm == adapter.declare(config)}


def needs_memory(config: dict[str, Any]) -> bool:
    """Whether the constructor computes with its tensors: ALiBi slopes, Gemma 3n's constants."""
    return bool(config.get("alibi")) or config["model_type"] in {"bloom", "gemma3n_text"}


def built_model(vllm_config: VllmConfig, config: dict[str, Any]) -> torch.nn.Module:
    device = "cpu" if needs_memory(config) else "meta"
    with set_current_vllm_config(vllm_config):
        initialize_model_parallel(1, 1)
        try:
            with torch.device(device):
                return initialize_model(vllm_config)
        finally:
            destroy_model_parallel()


def layer_row(name: str, layer: Any, modules: dict[str, Any]) -> dict[str, Any]:
    # Latent layers have neither sharing nor sinks.
    target = getattr(layer, "kv_sharing_target_layer_name", None)
    rotary = modules.get(name.rsplit(".", 1)[0] + ".rotary_emb")
    return {
        "index": layer_index(name),
        "num_kv_heads": layer.num_kv_heads,
        "num_qo_heads": layer.num_heads,
        "head_dim": layer.head_size,
        "window_tokens": layer.sliding_window,
        "chunk_tokens": getattr(layer, "attention_chunk_size", None),
        "shares_kv_with": None if target is None else layer_index(target),
        "has_sinks": getattr(layer, "has_sink", False),
        "soft_cap": getattr(layer.impl, "logits_soft_cap", None) or None,
        "rotary": rotary
        and {
            "theta": rotary.base,
            "rotary_dim": rotary.rotary_dim,
            "interleaved": not rotary.is_neox_style,
        },
    }


def layer_index(name: str) -> int:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    assert found, name
    return int(found.group(1))


def main(files: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        for file in files:
            config = text_config(json.loads(Path(file).read_text()))
            try:
                row = compared(config)
            except Exception as error:
                row = {"error": repr(error)}
            print(json.dumps({"file": Path(file).stem, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
