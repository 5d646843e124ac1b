"""A tiny random-weight model per family: through mstar stock answers, and bounded ones right.

Bounded answers are judged by the Hugging Face model with the explicit mask of the rule. A family
that cannot be bounded is refused, at the start of a server with a policy, by what rules it out.

Not served here: Chameleon, which vLLM has dropped; first-generation DeepSeek and pruned Nemotron,
whose configurations are remote code; Emu3, whose text model is none that vLLM serves alone; Jamba,
whose Mamba layers have no kernel in vLLM's CPU build. What they declare is checked in
test_published_models.py and, where vLLM can build their layers, in test_against_vllm.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from tiny_families import BOUNDED, REFUSED, TEXT_FOLDER, VISION, VOCABULARY, WINDOWED  # noqa: E402

NEEDS_TORCHVISION = (*VISION, "qwen3_5")
FAMILIES = (*BOUNDED, *VISION, *WINDOWED, *REFUSED)
PAGE = 32
POLICY = [32, 20]
TIE = 2e-4
REASONS = {
    "gpt2": "learned positions",
    "opt": "learned positions",
    "gpt_bigcode": "learned positions",
    "falcon-alibi": "ALiBi",
    "bloom": "ALiBi",
    "deepseek_v2": "MLA",
    "deepseek_v3": "MLA",
    "glm4_moe_lite": "MLA",
    "jamba": "state-space layers",
    "granitemoehybrid": "state-space layers",
    "nemotron_h": "state-space layers",
    "qwen3_next": "state-space layers",
    "qwen3_5": "state-space layers",
}
# What vLLM's CPU build lacks for them, with the stock backend as with ours.
STOCK_CANNOT = {"jamba": "selective_scan_fwd"}
# vLLM's linear attention on CPU takes nothing else, nor do these experts on processors with AMX.
BFLOAT16 = ("qwen3_next", "qwen3_5", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# Where `make env` puts it on a CPU, see install_env.py.
TORCHVISION = Path(sys.prefix) / "torchvision"
needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None and not TORCHVISION.exists(),
    reason="vLLM's code for this model needs torchvision",
)


def cases(*families: str) -> list[Any]:
    return [
        pytest.param(family, marks=needs_torchvision if family in NEEDS_TORCHVISION else ())
        for family in families
    ]


GREEDY = {"max_tokens": 24, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
OWN_POLICY = {"mstar_context_budget": POLICY[0], "mstar_protected_prefix": POLICY[1]}
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": PAGE,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
}
SERVER_POLICY = {
    "mstar": {
        "retention": {
            "context_budget": POLICY[0],
            "protected_prefix": POLICY[1],
            "positions": "absolute",
        }
    }
}


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % (VOCABULARY - 10) + 5 for i in range(length)]


PROMPTS = [prompt(90, 1), prompt(33, 2), prompt(130, 3)]
ROUND = [{"prompt": tokens, "sampling": GREEDY} for tokens in PROMPTS]
BOUNDED_ROUND = [
    {"prompt": tokens, "sampling": {**GREEDY, "extra_args": OWN_POLICY}} for tokens in PROMPTS
]


def job(folder: Path, backend: str, *rounds: Any, **engine: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "backend": backend,
        "engine": {**ENGINE, **engine},
        "rounds": rounds,
    }


def jobs_of(family: str, folder: Path) -> dict[str, Any]:
    """The stock engine, ours without a policy and with one, and a server that wants one of all."""
    if family in VISION:
        blind = {"language_model_only": True}
        return {
            "stock": job(folder, "CPU_ATTN", ROUND, **blind),
            "mstar": job(folder, "mstar", ROUND, BOUNDED_ROUND, **blind),
        }
    if family in REFUSED:
        dtype = {"dtype": "bfloat16" if family in BFLOAT16 else "float32"}
        return {
            "stock": job(folder, "CPU_ATTN", ROUND, **dtype),
            "mstar": job(folder, "mstar", ROUND, **dtype),
            "bounded": job(folder, "mstar", ROUND, additional_config=SERVER_POLICY, **dtype),
        }
    return {
        "stock": job(folder, "CPU_ATTN", ROUND),
        "mstar": job(folder, "mstar", ROUND, BOUNDED_ROUND),
    }


def run_script(script: Path, *arguments: object, **environment: str) -> str:
    """Run a script to its end, however it ends; what it printed last."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(TORCHVISION), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def serve(families: Iterable[str], work: Path) -> None:
    """Leave the results of every family in `work`; one that ends the process gets an error."""
    left = list(families)
    while left:
        asked = work / "jobs.json"
        asked.write_text(json.dumps({family: jobs_of(family, work / family) for family in left}))
        printed = run_script(HERE / "run_families.py", asked, work)
        while left and (work / f"{left[0]}.json").exists():
            left.pop(0)
        if left:
            crash = dict.fromkeys(("stock", "mstar", "bounded"), {"error": printed})
            (work / f"{left.pop(0)}.json").write_text(json.dumps(crash))


Answers = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and the results of the families that this run asks for."""
    wanted = {
        item.callspec.params["family"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    }
    families = [family for family in FAMILIES if family in wanted]
    folder = tmp_path_factory.mktemp("families")
    printed = run_script(HERE / "tiny_families.py", folder, *families)
    assert (folder / families[-1]).exists(), printed
    serve(families, folder)
    return folder


@pytest.fixture(scope="module")
def result(work: Path) -> Answers:
    """The result of one kind of engine for a family."""
    return lambda family, kind: json.loads((work / f"{family}.json").read_text())[kind]


@pytest.fixture(scope="module")
def rounds(result: Answers) -> Callable[[str, str], list[Any]]:
    """The rounds of a family's engine, which must have served them."""

    def served(family: str, kind: str) -> list[Any]:
        found = result(family, kind)
        assert "error" not in found, found["error"]
        answers = [answer for served in found["rounds"] for answer in served]
        assert all(isfinite(x) for answer in answers for x in answer["logprobs"][0])
        return list(found["rounds"])

    return served


@pytest.mark.parametrize("family", cases(*(f for f in FAMILIES if f not in STOCK_CANNOT)))
def test_unbounded_answers_are_those_of_the_stock_backend(
    family: str, rounds: Callable[[str, str], list[Any]]
) -> None:
    assert rounds(family, "mstar")[0] == rounds(family, "stock")[0]


@pytest.mark.parametrize("family", STOCK_CANNOT)
def test_what_the_stock_backend_cannot_serve_here_fails_alike(family: str, result: Answers) -> None:
    assert STOCK_CANNOT[family] in result(family, "stock")["error"]
    assert result(family, "mstar") == result(family, "stock")


@pytest.mark.parametrize("family", cases(*REFUSED))
def test_a_policy_is_refused_with_what_rules_it_out(family: str, result: Answers) -> None:
    error = result(family, "bounded")["error"]
    assert "mstar cannot bound requests with" in error
    assert REASONS[family] in error


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_a_latent_model_is_served_with_ordinary_heads_where_mla_is_switched_off(
    family: str, work: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "jobs.json"
    asked.write_text(json.dumps({family: jobs_of(family, work / family)}))
    printed = run_script(HERE / "run_families.py", asked, tmp_path, VLLM_MLA_DISABLE="1")
    assert (tmp_path / f"{family}.json").exists(), printed
    found = json.loads((tmp_path / f"{family}.json").read_text())
    assert "error" not in found["stock"], found["stock"]["error"]
    assert found["mstar"] == found["stock"]
    assert "MLA" in found["bounded"]["error"]


@pytest.mark.parametrize("family", WINDOWED)
def test_a_policy_changes_nothing_where_every_layer_slides(
    family: str, rounds: Callable[[str, str], list[Any]]
) -> None:
    unbounded, bounded = rounds(family, "mstar")
    assert [a["tokens"] for a in bounded] == [a["tokens"] for a in unbounded]


@pytest.mark.parametrize("family", cases(*BOUNDED, *VISION))
def test_bounding_changes_what_the_family_answers(
    family: str, rounds: Callable[[str, str], list[Any]]
) -> None:
    unbounded, bounded = rounds(family, "mstar")
    assert [a["logprobs"] for a in bounded] != [a["logprobs"] for a in unbounded]


@pytest.fixture(scope="module")
def verdicts(work: Path) -> dict[str, Any]:
    """Family -> the masked model's verdicts on its bounded answers, one per request."""
    jobs = {}
    for family in (*BOUNDED, *VISION):
        file = work / f"{family}.json"
        found = json.loads(file.read_text())["mstar"] if file.exists() else {"error": "not asked"}
        if "error" not in found:
            jobs[family] = oracle_jobs(oracle_folder(work, family), found["rounds"][1])
    asked, answered = work / "asked.json", work / "answered.json"
    asked.write_text(json.dumps(jobs))
    printed = run_script(HERE / "judge_families.py", asked, answered)
    assert answered.exists(), printed
    judged: dict[str, Any] = json.loads(answered.read_text())
    return judged


def oracle_folder(work: Path, family: str) -> Path:
    return work / family / TEXT_FOLDER if family in VISION else work / family


def oracle_jobs(folder: Path, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "model": str(folder),
            "tokens": tokens + answer["tokens"][0],
            "start": len(tokens),
            "page": PAGE,
            "policy": POLICY,
        }
        for tokens, answer in zip(PROMPTS, answers, strict=True)
    ]


@pytest.mark.parametrize("family", cases(*BOUNDED, *VISION))
def test_bounded_answers_are_those_of_the_masked_model(
    family: str, rounds: Callable[[str, str], list[Any]], verdicts: dict[str, Any]
) -> None:
    answers = rounds(family, "mstar")[1]
    for answer, verdict in zip(answers, verdicts[family], strict=True):
        for token, logprob, (choice, margin, expected) in zip(
            answer["tokens"][0], answer["logprobs"][0], verdict, strict=True
        ):
            assert token == choice or margin < TIE
            assert logprob == pytest.approx(expected, abs=TIE)
