"""Declarations of published models, from excerpts of their config.json in files named by model id.

A summary row reads "<layers> <group> <KV heads>/<query heads>x<head_dim>". The number behind it is
bytes per token in 16-bit elements: 2 * 2 * heads * head_dim summed over the layers that store KV.
"""

import json
from pathlib import Path

import pytest

from mstar_plugin.adapters import find_adapter, kv_groups
from mstar_plugin.model_kv import LayerKind, ModelKV

PUBLISHED = Path(__file__).parent / "published"

EXPECTED = {
    "BAAI/Emu3-Chat-hf": ("32 full 8/32x128", 131_072),
    "CohereForAI/c4ai-command-r-v01": ("40 full 64/64x128", 1_310_720),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        "24 sliding_4097 8/32x128 + 8 full 8/32x128",
        131_072,
    ),
    "EleutherAI/pythia-1b": ("16 full 8/8x256", 131_072),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("30 full 3/9x64", 23_040),
    "HuggingFaceTB/SmolLM3-3B": ("36 full 4/16x128", 73_728),
    "Qwen/Qwen2.5-0.5B-Instruct": ("24 full 2/14x64", 12_288),
    "Qwen/Qwen2.5-7B-Instruct": ("28 full 4/28x128", 57_344),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("28 full 4/28x128", 57_344),
    "Qwen/Qwen3-30B-A3B": ("48 full 4/32x128", 98_304),
    "Qwen/Qwen3-8B": ("36 full 8/32x128", 147_456),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("12 full 2/16x256", 24_576),
    "Qwen/Qwen3-VL-8B-Instruct": ("36 full 8/32x128", 147_456),
    "THUDM/GLM-4-9B-0414": ("40 full 2/32x128", 40_960),
    "ai21labs/Jamba-v0.1": ("4 full 8/32x128", 16_384),
    "allenai/OLMo-2-1124-7B": ("32 full 32/32x128", 524_288),
    "allenai/Olmo-3-1025-7B": ("24 sliding_4096 32/32x128 + 8 full 32/32x128", 524_288),
    "bigcode/starcoder": ("40 full 1/48x128", 20_480),
    "bigscience/bloom-560m": ("24 full 16/16x64", 98_304),
    "deepseek-ai/DeepSeek-V2-Lite": ("27 mla 1/16x576", 31_104),
    "deepseek-ai/DeepSeek-V3": ("61 mla 1/128x576", 70_272),
    "deepseek-ai/deepseek-moe-16b-base": ("28 full 16/16x128", 229_376),
    "facebook/chameleon-7b": ("32 full 32/32x128", 524_288),
    "facebook/opt-125m": ("12 full 12/12x64", 36_864),
    "google/gemma-2-9b": ("21 sliding_4096 8/16x256 + 21 full 8/16x256", 344_064),
    "google/gemma-2b": ("18 full 1/8x256", 18_432),
    "google/gemma-3-1b-it": ("22 sliding_512 1/4x256 + 4 full 1/4x256", 26_624),
    "google/gemma-3-27b-it": ("52 sliding_1024 16/32x128 + 10 full 16/32x128", 507_904),
    "google/gemma-3-4b-it": ("29 sliding_1024 4/8x256 + 5 full 4/8x256", 139_264),
    "google/gemma-3n-E4B-it": ("16 sliding_512 2/8x256 + 4 full 2/8x256", 40_960),
    "google/gemma-4-31B-it": ("50 sliding_1024 16/32x256 + 10 full 4/32x512", 901_120),
    "google/gemma-4-E4B-it": ("20 sliding_512 2/8x256 + 4 full 2/8x512", 57_344),
    "ibm-granite/granite-3.1-8b-instruct": ("40 full 8/32x128", 163_840),
    "ibm-granite/granite-4.0-h-tiny": ("4 full 4/12x128", 8_192),
    "meta-llama/Llama-2-7b-hf": ("32 full 32/32x128", 524_288),
    "meta-llama/Llama-3.1-8B": ("32 full 8/32x128", 131_072),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "36 chunked_8192 8/40x128 + 12 full 8/40x128",
        196_608,
    ),
    "microsoft/Phi-3-mini-4k-instruct": ("32 sliding_2047 32/32x96", 393_216),
    "microsoft/Phi-3.5-MoE-instruct": ("32 full 8/32x128", 131_072),
    "microsoft/phi-2": ("32 full 32/32x80", 327_680),
    "microsoft/phi-4": ("40 full 10/40x128", 204_800),
    "mistralai/Ministral-8B-Instruct-2410": ("36 full 8/32x128", 147_456),
    "mistralai/Mistral-7B-Instruct-v0.3": ("32 full 8/32x128", 131_072),
    "mistralai/Mistral-7B-v0.1": ("32 sliding_4096 8/32x128", 131_072),
    "mistralai/Mistral-Nemo-Instruct-2407": ("40 full 8/32x128", 163_840),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ("40 full 8/32x128", 163_840),
    "mistralai/Mixtral-8x7B-v0.1": ("32 full 8/32x128", 131_072),
    "nvidia/Cosmos-Reason1-7B": ("28 full 4/28x128", 57_344),
    "nvidia/Minitron-8B-Base": ("32 full 8/48x128", 131_072),
    "nvidia/Nemotron-H-8B-Base-8K": ("4 full 8/32x128", 16_384),
    "openai-community/gpt2": ("12 full 12/12x64", 36_864),
    "openai/gpt-oss-20b": ("12 sliding_128 8/64x64 + 12 full 8/64x64", 49_152),
    "stabilityai/stablelm-3b-4e1t": ("32 full 32/32x80", 327_680),
    "tiiuae/falcon-40b": ("60 full 8/128x64", 122_880),
    "tiiuae/falcon-7b": ("32 full 1/71x64", 8_192),
    "tiiuae/falcon-rw-1b": ("24 full 32/32x64", 196_608),
    "zai-org/GLM-4.5-Air": ("46 full 8/96x128", 188_416),
    "zai-org/GLM-4.7-Flash": ("47 mla 1/20x576", 54_144),
}


def published(model_id: str) -> ModelKV:
    file = PUBLISHED / f"{model_id.replace('/', '--')}.json"
    config = json.loads(file.read_text())
    adapter = find_adapter(config["architectures"])
    assert adapter is not None, f"no adapter speaks for {config['architectures']}"
    return adapter.declare(config)


def summary(model: ModelKV) -> str:
    rows = []
    for group in kv_groups(model):
        first = group.layers[0]
        shape = f"{first.num_kv_heads}/{first.num_qo_heads}x{first.head_dim}"
        rows.append(f"{len(group.layers)} {group.key} {shape}")
    return " + ".join(rows)


@pytest.mark.parametrize("model_id", EXPECTED)
def test_groups_and_bytes_are_those_of_the_published_model(model_id: str) -> None:
    model = published(model_id)
    groups, bytes_per_token = EXPECTED[model_id]
    assert summary(model) == groups
    assert 2 * model.elements_per_token == bytes_per_token


def test_every_published_file_is_checked() -> None:
    files = {file.stem.replace("--", "/") for file in PUBLISHED.glob("*.json")}
    assert files == EXPECTED.keys()


@pytest.mark.parametrize(
    ("model_id", "full_layers"),
    [
        ("google/gemma-2-9b", list(range(1, 42, 2))),
        ("google/gemma-3-1b-it", [5, 11, 17, 23]),
        ("google/gemma-3n-E4B-it", [4, 9, 14, 19, 24, 29, 34]),
        ("google/gemma-4-E4B-it", [5, 11, 17, 23, 29, 35, 41]),
        ("openai/gpt-oss-20b", list(range(1, 24, 2))),
        ("allenai/Olmo-3-1025-7B", [3, 7, 11, 15, 19, 23, 27, 31]),
        ("CohereForAI/c4ai-command-r7b-12-2024", [3, 7, 11, 15, 19, 23, 27, 31]),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", list(range(3, 48, 4))),
        ("ai21labs/Jamba-v0.1", [4, 12, 20, 28]),
        ("nvidia/Nemotron-H-8B-Base-8K", [7, 18, 29, 40]),
        ("ibm-granite/granite-4.0-h-tiny", [5, 15, 25, 35]),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", list(range(3, 48, 4))),
    ],
)
def test_full_layers_are_at_their_places(model_id: str, full_layers: list[int]) -> None:
    model = published(model_id)
    assert [x.index for x in model.layers if x.kind is LayerKind.FULL] == full_layers


@pytest.mark.parametrize(
    ("model_id", "without_rotary"),
    [
        ("HuggingFaceTB/SmolLM3-3B", list(range(3, 36, 4))),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", list(range(3, 48, 4))),
        ("CohereForAI/c4ai-command-r7b-12-2024", list(range(3, 32, 4))),
        ("openai-community/gpt2", list(range(12))),
        ("ai21labs/Jamba-v0.1", [4, 12, 20, 28]),
        ("meta-llama/Llama-3.1-8B", []),
    ],
)
def test_layers_without_rotary_positions_are_named(
    model_id: str, without_rotary: list[int]
) -> None:
    model = published(model_id)
    assert [x.index for x in model.layers if x.rotary is None] == without_rotary


@pytest.mark.parametrize(
    ("model_id", "layer", "theta", "rotary_dim", "interleaved", "scaling"),
    [
        ("meta-llama/Llama-2-7b-hf", 0, 10_000.0, 128, False, None),
        ("meta-llama/Llama-3.1-8B", 0, 500_000.0, 128, False, "llama3"),
        ("microsoft/phi-2", 0, 10_000.0, 32, False, None),
        ("EleutherAI/pythia-1b", 0, 10_000.0, 64, False, None),
        ("stabilityai/stablelm-3b-4e1t", 0, 10_000.0, 20, False, None),
        ("THUDM/GLM-4-9B-0414", 0, 10_000.0, 64, True, None),
        ("CohereForAI/c4ai-command-r-v01", 0, 8_000_000.0, 128, True, None),
        ("google/gemma-3-4b-it", 0, 10_000.0, 256, False, None),
        ("google/gemma-3-4b-it", 5, 1_000_000.0, 256, False, "linear"),
        ("google/gemma-4-31B-it", 0, 10_000.0, 256, False, None),
        ("google/gemma-4-31B-it", 5, 1_000_000.0, 512, False, "proportional"),
        ("allenai/Olmo-3-1025-7B", 0, 500_000.0, 128, False, None),
        ("allenai/Olmo-3-1025-7B", 3, 500_000.0, 128, False, "yarn"),
        ("openai/gpt-oss-20b", 0, 150_000.0, 64, False, "yarn"),
        ("deepseek-ai/DeepSeek-V3", 0, 10_000.0, 64, True, "yarn"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 0, 1_000_000.0, 128, False, "mrope"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 3, 10_000_000.0, 64, False, None),
    ],
)
def test_rotary_settings_are_those_of_the_layer(
    model_id: str,
    layer: int,
    theta: float,
    rotary_dim: int,
    interleaved: bool,
    scaling: str | None,
) -> None:
    rotary = next(x.rotary for x in published(model_id).layers if x.index == layer)
    assert rotary is not None
    found = (rotary.theta, rotary.rotary_dim, rotary.interleaved, rotary.scaling)
    assert found == (theta, rotary_dim, interleaved, scaling)


def test_scaling_parameters_are_hashable_pairs_in_order() -> None:
    rotary = published("meta-llama/Llama-3.1-8B").layers[0].rotary
    assert rotary is not None
    assert rotary.parameters == (
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 8192),
    )


def test_gemma_3n_shares_the_last_layer_of_each_type_before_the_sharing_ones() -> None:
    shares = {x.index: x.shares_kv_with for x in published("google/gemma-3n-E4B-it").layers}
    assert [shares[index] for index in range(20)] == [None] * 20
    assert {shares[index] for index in (24, 29, 34)} == {19}
    assert {shares[index] for index in range(20, 35) if index not in (24, 29, 34)} == {18}


def test_soft_cap_and_sinks_are_declared_only_where_they_are() -> None:
    assert {x.soft_cap for x in published("google/gemma-2-9b").layers} == {50.0}
    assert {x.soft_cap for x in published("google/gemma-3-1b-it").layers} == {None}
    assert {x.has_sinks for x in published("openai/gpt-oss-20b").layers} == {True}
    assert {x.has_sinks for x in published("ibm-granite/granite-3.1-8b-instruct").layers} == {False}


@pytest.mark.parametrize(
    ("model_id", "word"),
    [
        ("deepseek-ai/DeepSeek-V3", "MLA"),
        ("ai21labs/Jamba-v0.1", "recurrent"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "recurrent"),
        ("ibm-granite/granite-4.0-h-tiny", "recurrent"),
        ("bigscience/bloom-560m", "ALiBi"),
        ("tiiuae/falcon-rw-1b", "ALiBi"),
        ("openai-community/gpt2", "learned positions"),
        ("facebook/opt-125m", "learned positions"),
    ],
)
def test_retention_is_refused_with_the_kind_of_layer(model_id: str, word: str) -> None:
    refusal = published(model_id).retention_refusal
    assert refusal is not None
    assert word in refusal


REFUSED = {
    "ai21labs/Jamba-v0.1",
    "bigcode/starcoder",
    "bigscience/bloom-560m",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "facebook/opt-125m",
    "ibm-granite/granite-4.0-h-tiny",
    "nvidia/Nemotron-H-8B-Base-8K",
    "openai-community/gpt2",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "tiiuae/falcon-rw-1b",
    "zai-org/GLM-4.7-Flash",
}


@pytest.mark.parametrize("model_id", sorted(EXPECTED.keys() - REFUSED))
def test_rotary_decoders_allow_retention(model_id: str) -> None:
    assert published(model_id).retention_refusal is None
