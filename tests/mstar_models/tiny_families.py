"""Tiny random-weight models, one per family: `tiny_families.py FOLDER NAME...` saves them.

Shapes keep what is particular to each: heads to KV heads, the turned share of a head, which layers
slide, turn their keys, share others' KV or keep a recurrent state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HIDDEN, VOCABULARY, WINDOW = 128, 512, 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 1.2 / HIDDEN**0.5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FULL_HEADS = {"num_key_value_heads": 4}
FOUR_LAYERS = {"num_hidden_layers": 4}
SLIDING = {"sliding_window": WINDOW}
TURNS = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# vLLM's Command and Gemma models have no output embedding of their own.
TIED = {"tie_word_embeddings": True}
SHARED = {
    **FOUR_LAYERS,
    **SLIDING,
    **TIED,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}
ROUTED = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# The only sizes for which vLLM has an MLA kernel on CPU.
LATENT = {
    **ROUTED,
    **FULL_HEADS,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
LINEAR = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# Name -> configuration class of transformers, and what differs from COMMON.
Recipes = dict[str, tuple[str, dict[str, Any]]]
BOUNDED: Recipes = {
    "llama3": ("LlamaConfig", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama4": (
        "Llama4TextConfig",
        {
            **FOUR_LAYERS,
            **EXPERTS,
            "num_experts_per_tok": 1,
            "head_dim": 32,
            "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 64,
        },
    ),
    "mistral": ("MistralConfig", {"head_dim": 64, "sliding_window": None}),
    "ministral3": ("Ministral3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {**EXPERTS, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        {**SLIDING, **TIED, "head_dim": 32, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**TURNS, **TIED, "head_dim": 32, "query_pre_attn_scalar": 32},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**SHARED, "head_dim": 32, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": ("Gemma4TextConfig", {**SHARED, "head_dim": 32, "global_head_dim": 64}),
    "phi": ("PhiConfig", {**FULL_HEADS, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.75}),
    "phimoe": ("PhimoeConfig", {**EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    "gpt_neox": ("GPTNeoXConfig", {**FULL_HEADS, "rotary_pct": 0.25}),
    "falcon": ("FalconConfig", {"num_kv_heads": 1}),
    "stablelm": ("StableLmConfig", FULL_HEADS),
    "olmo": ("OlmoConfig", FULL_HEADS),
    "olmo2": ("Olmo2Config", {"rope_theta": 5e5}),
    "olmo3": ("Olmo3Config", {**TURNS, "rope_scaling": YARN}),
    "olmoe": ("OlmoeConfig", {**FULL_HEADS, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("CohereConfig", {**FULL_HEADS, **TIED, "logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", {**FOUR_LAYERS, **SLIDING, **TIED, "logit_scale": 1.0}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.25}),
    "granitemoe": ("GraniteMoeConfig", {**EXPERTS, "attention_multiplier": 0.25}),
    "smollm3": ("SmolLM3Config", {**FOUR_LAYERS, "no_rope_layers": [1, 1, 1, 0]}),
    "glm": ("GlmConfig", {"head_dim": 32}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "glm4_moe": ("Glm4MoeConfig", {**ROUTED, "head_dim": 32}),
    "gpt_oss": ("GptOssConfig", {**TURNS, **EXPERTS, "head_dim": 64}),
    "nemotron": ("NemotronConfig", {"partial_rotary_factor": 0.5}),
}
# All of its layers slide, so a policy has nothing to bound.
WINDOWED: Recipes = {"mistral-window": ("MistralConfig", {**SLIDING, "head_dim": 64})}
REFUSED: Recipes = {
    "gpt2": ("GPT2Config", {}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN, "init_std": COMMON["initializer_range"]},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", {"num_key_value_heads": 1}),
    "falcon-alibi": ("FalconConfig", {"alibi": True, "multi_query": False}),
    "bloom": ("BloomConfig", {**TIED, "num_key_value_heads": 4}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 48, "topk_method": "noaux_tc"}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "q_lora_rank": 48, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "jamba": (
        "JambaConfig",
        {
            **MAMBA_EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **EXPERTS,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_head": 32,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 32,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **LINEAR,
            **MAMBA_EXPERTS,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
}
# Where the published files name another architecture than transformers does now.
PUBLISHED_NAMES = {"phimoe": "PhiMoEForCausalLM"}
RECIPES: Recipes = {**BOUNDED, **WINDOWED, **REFUSED}

TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
INTERLEAVED = {**SECTIONS, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
# Name -> prefixes of the whole model's class and of the text model's that answers alike without
# images, and what differs from COMMON in the text and in the vision configuration.
VISION: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "Qwen2",
        # The whole model's default is not the text model's.
        {"rope_parameters": SECTIONS, "rms_norm_eps": 1e-6},
        {**EYES, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        "Qwen3",
        {"rope_parameters": INTERLEAVED, "head_dim": 32},
        {**EYES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}
TEXT_FOLDER = "text"


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


def final_norm(model: Any) -> Any:
    base = model.base_model
    return base.ln_f if hasattr(base, "ln_f") else base.norm


def save(name: str, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(3)
    if name in VISION:
        save_with_eyes(name, folder)
        return
    config_class, changes = RECIPES[name]
    config = getattr(transformers, config_class)(**{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.tie_word_embeddings:
        flip_signs(final_norm(model))
    model.save_pretrained(folder / name)
    if name in PUBLISHED_NAMES:
        rename_architecture(folder / name / "config.json", PUBLISHED_NAMES[name])


def rename_architecture(file: Path, architecture: str) -> None:
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": [architecture]}))


def save_with_eyes(name: str, folder: Path) -> None:
    """The whole model, and below it the text model with the same weights."""
    import transformers

    whole, text, changes, vision = VISION[name]
    settings = {**COMMON, **changes}
    config = getattr(transformers, f"{whole}Config")(
        text_config=settings, vision_config=vision, tie_word_embeddings=False, **TOKENS
    )
    model = getattr(transformers, f"{whole}ForConditionalGeneration")(config).float()
    model.save_pretrained(folder / name)
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": SECTIONS["rope_theta"]}
    blind = getattr(transformers, f"{text}ForCausalLM")(
        getattr(transformers, f"{text}Config")(**settings)
    )
    blind.model.load_state_dict(model.model.language_model.state_dict())
    blind.lm_head.load_state_dict(model.lm_head.state_dict())
    blind.save_pretrained(folder / name / TEXT_FOLDER)


if __name__ == "__main__":
    for family in sys.argv[2:]:
        save(family, Path(sys.argv[1]))
