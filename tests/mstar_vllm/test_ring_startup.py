"""Rings that cannot be kept as asked are refused by name in the front end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.policy import PolicyError
from mstar_vllm.requests import check_frames
from mstar_vllm.serving import RINGS, ServingPlan, serving_plan
from mstar_vllm.settings import Settings

pytestmark = pytest.mark.vllm

NEAR = {"ring_buckets": 4}
FRAME = 16


@pytest.fixture
def configure(frame_model: str) -> Callable[..., Any]:
    """The front end's configuration of a server of the frame decoder, made in this process."""

    def make(**changes: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        values = {
            "model": frame_model,
            "attention_backend": "mstar",
            "max_model_len": 8192,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            **changes,
        }
        return EngineArgs(**values).create_engine_config()

    return make


def ring(**values: Any) -> dict[str, Any]:
    table = {"tokens_per_frame": FRAME, "layers": NEAR, **values}
    return {"additional_config": {"mstar": {"ring": table}}}


def test_the_models_rings_are_kept_and_the_frame_is_the_block(
    configure: Callable[..., Any],
) -> None:
    config = configure()
    plan = serving_plan(config)
    assert plan.ring is not None
    assert [layer.pinned_dilation for layer in plan.ring.layers] == [1, 4, 1, 1]
    assert plan.obstacle == RINGS
    assert plan.retention is None
    assert config.cache_config.block_size == FRAME


def test_the_operators_rings_win_over_the_models(configure: Callable[..., Any]) -> None:
    plan = serving_plan(configure(**ring(tokens_per_frame=32)))
    assert plan.ring is not None
    assert plan.ring.tokens_per_frame == 32
    assert {layer.pinned_dilation for layer in plan.ring.layers} == {1}


def test_any_model_of_full_attention_can_be_given_rings(
    configure: Callable[..., Any], smollm2: Path
) -> None:
    plan = serving_plan(configure(model=str(smollm2), **ring()))
    assert plan.ring is not None
    assert len(plan.ring.layers) == 30


RETENTION = {"context_budget": 256}
BOTH = {"mstar": {"ring": {"tokens_per_frame": FRAME, "layers": NEAR}, "retention": RETENTION}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (ring(layers=[NEAR] * 3), "one geometry per layer (4), got 3"),
        (ring(layers=[NEAR] * 5), "one geometry per layer (4), got 5"),
        (ring(layers={"ring_buckets": 0}), "['layers']['ring_buckets']"),
        (ring(sessions=4), "knows tokens_per_frame, layers, got sessions"),
        (ring(tokens_per_frame=24), "tokens_per_frame must be a multiple of 16 with mstar, got 24"),
        ({"block_size": 32}, "--block-size must be left out or be the frame's 16 tokens"),
        (
            {"max_num_batched_tokens": 128},
            "--max-num-batched-tokens must be at most the 64 tokens of the smallest ring",
        ),
        ({"disable_hybrid_kv_cache_manager": True}, "hybrid KV cache manager"),
        (
            {"hf_overrides": {"mstar": {"rings": {}}}},
            "config.json's 'mstar' must be a table with 'ring'",
        ),
        ({"additional_config": {"mstar": {"retention": RETENTION}}}, "with ring caches"),
        ({"additional_config": BOTH}, "with ring caches"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": "unused"},
                }
            },
            "cannot keep ring caches with a KV connector",
        ),
        (
            {"hf_overrides": {"architectures": ["BloomForCausalLM"]}},
            "cannot keep ring caches with ALiBi",
        ),
        ({"attention_backend": "CPU_ATTN"}, "asks for ring caches"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    changes: dict[str, Any], named: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="mstar|--block-size|--max-num-batched") as refused:
        configure(**changes)
    assert named in str(refused.value)


def test_another_backend_serves_the_model_once_its_block_is_taken_away(
    configure: Callable[..., Any],
) -> None:
    overrides = {"mstar": None, "architectures": ["LlamaForCausalLM"]}
    config = configure(attention_backend="CPU_ATTN", hf_overrides=overrides)
    assert config.model_config.architectures == ["LlamaForCausalLM"]


def test_the_frame_decoder_is_not_built_without_rings(configure: Callable[..., Any]) -> None:
    from mstar_vllm.frame_decoder import FrameDecoderForCausalLM

    with pytest.raises(ValueError, match="FrameDecoderForCausalLM needs --attention-backend mstar"):
        FrameDecoderForCausalLM(vllm_config=configure(hf_overrides={"mstar": None}))


def test_registering_makes_the_frame_decoder_known_without_importing_it() -> None:
    code = (
        "import sys, mstar_vllm; mstar_vllm.register(); mstar_vllm.raise_if_unusable()\n"
        "from vllm import ModelRegistry\n"
        "known = 'FrameDecoderForCausalLM' in ModelRegistry.get_supported_archs()\n"
        "print(known, 'mstar_vllm.frame_decoder' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["True", "False"]


class Asked:
    """What the front end looks at of a request."""

    prompt_embeds = None

    def __init__(self, num_tokens: int) -> None:
        self.prompt_token_ids = [1] * num_tokens


def test_a_prompt_that_ends_inside_a_frame_is_refused(configure: Callable[..., Any]) -> None:
    plan = serving_plan(configure())
    check_frames(Asked(3 * FRAME), plan)
    with pytest.raises(PolicyError, match="whole frames of 16 tokens, got 37 tokens") as refused:
        check_frames(Asked(37), plan)
    assert refused.value.parameter == "prompt"


def test_a_server_without_rings_takes_any_prompt() -> None:
    policy = RetentionPolicy(64, 0)
    plan = ServingPlan(
        settings=Settings(), adapter="llama", model=None, retention=policy, obstacle=None
    )
    check_frames(Asked(37), plan)
