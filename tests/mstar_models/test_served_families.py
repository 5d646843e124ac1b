"""A tiny random-weight model per family: through mstar stock answers, and bounded ones right.

Shapes keep the ratios of the real models (heads to KV heads, turned share of a head, which layers
slide). Bounded answers are judged by the Hugging Face model with the explicit mask of the rule.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENGINES = Path(__file__).parents[1] / "mstar_vllm" / "run_engines.py"
ORACLE = Path(__file__).parents[1] / "mstar_vllm" / "masked_model.py"
HIDDEN, VOCABULARY, WINDOW, PAGE = 128, 512, 24, 32
POLICY = [32, 20]
TIE = 2e-4
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
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
SLIDING = {"sliding_window": WINDOW}
# vLLM's Command models have no output embedding of their own.
COHERE = {"logit_scale": 1.0, "tie_word_embeddings": True}
BOUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "gemma": ("GemmaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.75}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "falcon": ("FalconConfig", {"num_attention_heads": 4, "num_kv_heads": 1}),
    "stablelm": ("StableLmConfig", {"num_key_value_heads": 4}),
    "olmo2": ("Olmo2Config", {"rope_theta": 5e5}),
    "olmo3": ("Olmo3Config", {"rope_scaling": YARN, **SLIDING}),
    "cohere": ("CohereConfig", {"num_key_value_heads": 4, **COHERE}),
    "cohere2": ("Cohere2Config", {**COHERE, **SLIDING}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.25}),
    "smollm3": ("SmolLM3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "nemotron": ("NemotronConfig", {"partial_rotary_factor": 0.5}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", {}, "learned positions"),
    "falcon-alibi": ("FalconConfig", {"alibi": True, "multi_query": False}, "ALiBi"),
}
FAMILIES = [*BOUNDED, *REFUSED]
KINDS: dict[str, tuple[str, list[int] | None]] = {
    "stock": ("CPU_ATTN", None),
    "mstar": ("mstar", None),
    "bounded": ("mstar", POLICY),
}
GREEDY = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % (VOCABULARY - 10) + 5 for i in range(length)]


PROMPTS = [prompt(90, 1), prompt(33, 2), prompt(130, 3)]
ROUND = [{"prompt": tokens, "sampling": GREEDY} for tokens in PROMPTS]


def save(name: str, folder: Path) -> Path:
    import torch

    config_class, changes = (BOUNDED.get(name) or REFUSED[name])[:2]
    config = getattr(transformers, config_class)(**{**COMMON, **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / name)
    return folder / name


def job(folder: Path, backend: str, policy: list[int] | None = None) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": PAGE,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
    }
    if policy is not None:
        retention = {"context_budget": policy[0], "protected_prefix": policy[1]}
        engine["additional_config"] = {"mstar": {"retention": retention}}
    return {"model": str(folder), "backend": backend, "engine": engine, "rounds": [ROUND]}


def run_script(script: Path, jobs: list[dict[str, Any]], work: Path) -> list[Any]:
    asked, answered = work / "jobs.json", work / "results.json"
    asked.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(script), str(asked), str(answered)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answered.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    results: list[Any] = json.loads(answered.read_text())
    return results


@dataclass(frozen=True, kw_only=True)
class Served:
    """One family's folder and what the engines answered, by kind."""

    folder: Path
    results: dict[str, Any]

    def answers(self, kind: str) -> list[dict[str, Any]]:
        assert "error" not in self.results[kind], self.results[kind]["error"]
        return list(self.results[kind]["rounds"][0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Each family in a process of its own, so that a crash stays with its family."""

    @cache
    def serve(family: str) -> Served:
        work = tmp_path_factory.mktemp(family)
        folder = save(family, work)
        jobs = [job(folder, *kind) for kind in KINDS.values()]
        results = run_script(ENGINES, jobs, work)
        return Served(folder=folder, results=dict(zip(KINDS, results, strict=True)))

    return serve


@pytest.mark.parametrize("family", FAMILIES)
def test_unbounded_answers_are_those_of_the_stock_backend(
    family: str, served: Callable[[str], Served]
) -> None:
    assert served(family).answers("mstar") == served(family).answers("stock")


@pytest.mark.parametrize("family", REFUSED)
def test_a_policy_is_refused_with_what_rules_it_out(
    family: str, served: Callable[[str], Served]
) -> None:
    assert REFUSED[family][2] in served(family).results["bounded"]["error"]


@pytest.mark.parametrize("family", BOUNDED)
def test_bounding_changes_what_the_family_answers(
    family: str, served: Callable[[str], Served]
) -> None:
    assert served(family).answers("bounded") != served(family).answers("mstar")


@pytest.mark.parametrize("family", BOUNDED)
def test_bounded_answers_are_those_of_the_masked_model(
    family: str, served: Callable[[str], Served], tmp_path: Path
) -> None:
    answers = served(family).answers("bounded")
    if family == "cohere2":
        widen_window(served(family).folder)
    jobs = [
        {
            "model": str(served(family).folder),
            "tokens": tokens + answer["tokens"][0],
            "start": len(tokens),
            "page": PAGE,
            "policy": POLICY,
        }
        for tokens, answer in zip(PROMPTS, answers, strict=True)
    ]
    for answer, verdict in zip(answers, run_script(ORACLE, jobs, tmp_path), strict=True):
        for token, logprob, (choice, margin, expected) in zip(
            answer["tokens"][0], answer["logprobs"][0], verdict, strict=True
        ):
            assert token == choice or margin < TIE
            assert logprob == pytest.approx(expected, abs=TIE)


def widen_window(folder: Path) -> None:
    """Cohere's window is W keys besides the query; the oracle's counts the query."""
    config = json.loads((folder / "config.json").read_text())
    config["sliding_window"] = WINDOW + 1
    (folder / "config.json").write_text(json.dumps(config))
