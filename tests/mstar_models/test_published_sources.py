"""Where the numbers in published/ were compared, model by model.

DEFAULTS: transformers' configuration class is written for that model, and a test compares with its
defaults. STORED: a public copy of the model's config.json, read beside ours. What is in neither was
written down without a copy to compare with; vLLM and transformers read it as declared
(test_against_vllm.py), which says nothing about the numbers themselves.
"""

import json
from pathlib import Path
from typing import Any

import pytest

PUBLISHED = Path(__file__).parent / "published"
PRESETS = "mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py at 01ced331a9e1"
CONFIGURATOR = "ai-dynamo/aiconfigurator, model_configs/"
MAXTEXT = "AI-Hypercomputer/maxtext, src/maxtext/checkpoint_conversion/utils/hf_model_configs.py"

# Model -> keys in which it differs from the defaults.
DEFAULTS: dict[str, set[str]] = {
    "BAAI/Emu3-Chat-hf": {"max_position_embeddings"},
    "CohereForAI/c4ai-command-r-v01": set(),
    "HuggingFaceTB/SmolLM3-3B": {"max_position_embeddings"},
    "THUDM/GLM-4-9B-0414": {"max_position_embeddings"},
    "ai21labs/Jamba-v0.1": set(),
    "allenai/OLMo-2-1124-7B": {"max_position_embeddings"},
    "allenai/Olmo-3-1025-7B": {"max_position_embeddings"},
    "deepseek-ai/DeepSeek-V3": {"max_position_embeddings"},
    "facebook/chameleon-7b": set(),
    "facebook/opt-125m": set(),
    "google/gemma-3n-E4B-it": set(),
    "meta-llama/Llama-2-7b-hf": {"max_position_embeddings"},
    "microsoft/Phi-3.5-MoE-instruct": {"sliding_window"},
    "mistralai/Mistral-7B-v0.1": {"max_position_embeddings"},
    "mistralai/Mixtral-8x7B-v0.1": {"max_position_embeddings"},
    "nvidia/Nemotron-H-8B-Base-8K": {"max_position_embeddings"},
    "tiiuae/falcon-7b": set(),
    "zai-org/GLM-4.5-Air": set(),
    "zai-org/GLM-4.7-Flash": set(),
}
STORED = {
    "CohereForAI/c4ai-command-r7b-12-2024": "COHERE2_CONFIG in a public table of converted models",
    "EleutherAI/pythia-1b": "EleutherAI/pythia, models/1B/pythia-1b.yml",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "the model's own folder, which `make model` fetches",
    "Qwen/Qwen2.5-0.5B-Instruct": "a README that shows DongfuJiang/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "g0t4/examples, 5090/try-vllm/check-model-config.py",
    "Qwen/Qwen2.5-VL-7B-Instruct": "unsloth/Qwen2.5-VL-7B-Instruct and TIGER-Lab/VL-Rethinker-7B",
    "Qwen/Qwen3-30B-A3B": "Ascend/MindSpeed-RL, configs/model/qwen3_30b_a3b.yaml",
    "Qwen/Qwen3-8B": "thejaminator/qwen-hook-layer-9, copied from it",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": CONFIGURATOR + "Qwen--Qwen3-Next-80B-A3B-Thinking",
    "Qwen/Qwen3-VL-8B-Instruct": "InternLM/xtuner, Qwen3VLDense8BConfig, and Ascend/MindSpeed-MM",
    "bigcode/starcoder": "bigcode/starcoder-co-format, made from it",
    "bigscience/bloom-560m": "a copy whose _name_or_path is bigscience/bloom-560m",
    "deepseek-ai/DeepSeek-V2-Lite": PRESETS,
    "deepseek-ai/deepseek-moe-16b-base": "the model's own config.json, a stored page",
    "google/gemma-2-9b": PRESETS,
    "google/gemma-2b": PRESETS,
    "google/gemma-3-1b-it": PRESETS,
    "google/gemma-3-27b-it": MAXTEXT + " and litgpt's litgpt/config.py",
    "google/gemma-3-4b-it": MAXTEXT + " and litgpt's litgpt/config.py",
    "google/gemma-4-31B-it": MAXTEXT,
    "google/gemma-4-E4B-it": MAXTEXT,
    "ibm-granite/granite-3.1-8b-instruct": "nm-testing/granite-3.1-8b-instruct2of4-sparse",
    "ibm-granite/granite-4.0-h-tiny": "inference-optimization/granite-4.0-h-tiny-FP8-dynamic",
    "meta-llama/Llama-3.1-8B": PRESETS,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": CONFIGURATOR
    + "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "microsoft/Phi-3-mini-4k-instruct": PRESETS,
    "microsoft/phi-2": PRESETS,
    "microsoft/phi-4": "microsoft/phi-4 at refs/pr/10",
    "mistralai/Ministral-8B-Instruct-2410": "rivaon/sydney, made from it",
    "mistralai/Mistral-7B-Instruct-v0.3": PRESETS,
    "mistralai/Mistral-Nemo-Instruct-2407": "riple-saanvi-lab/Saanvi-C0-12B, made from it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "the model's own config.json, a stored page",
    "nvidia/Minitron-8B-Base": "nvidia/Minitron-8B-Base",
    "openai-community/gpt2": PRESETS,
    "openai/gpt-oss-20b": "cryptonaut/AltiMind-sft, made from it",
    "stabilityai/stablelm-3b-4e1t": PRESETS,
    "tiiuae/falcon-40b": "tiiuae/falcon-40b at refs/pr/111",
    "tiiuae/falcon-rw-1b": "franco-rojas/falcon-rw-1b-finetuned-tfmviu, made from it",
}
NOT_COMPARED = {
    "nvidia/Cosmos-Reason1-7B",
}
KV_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "sliding_window",
    "attn_layer_period",
    "attn_layer_offset",
    "num_kv_shared_layers",
    "kv_lora_rank",
    "qk_rope_head_dim",
)


def published(model_id: str) -> dict[str, Any]:
    config = json.loads((PUBLISHED / f"{model_id.replace('/', '--')}.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def test_every_published_model_has_a_source_or_says_that_it_has_none() -> None:
    files = [file.stem.replace("--", "/") for file in PUBLISHED.glob("*.json")]
    assert sorted([*DEFAULTS, *STORED, *NOT_COMPARED]) == sorted(files)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_id", DEFAULTS)
def test_the_numbers_are_the_defaults_of_the_class_written_for_the_model(model_id: str) -> None:
    transformers = pytest.importorskip("transformers")
    text = published(model_id)
    defaults = transformers.CONFIG_MAPPING[text["model_type"]]().get_text_config().to_dict()
    known = [key for key in KV_KEYS if key in text and key in defaults]
    assert {key for key in known if text[key] != defaults[key]} == DEFAULTS[model_id]
    assert "hidden_size" in known
