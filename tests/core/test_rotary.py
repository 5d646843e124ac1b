"""Frequencies equal transformers', and a turned key is the key of the later position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstar_plugin.model_kv import Rotary
from mstar_plugin.rotary import inverse_frequencies

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
CASES: dict[str, tuple[float, float, str | None, dict[str, Any]]] = {
    "plain": (1e4, 1.0, None, {}),
    "a quarter of the head": (1e4, 0.25, None, {}),
    "linear": (1e4, 1.0, "linear", {"factor": 8.0}),
    "llama3": (5e5, 1.0, "llama3", LLAMA3),
    "yarn": (1e6, 1.0, "yarn", YARN),
    "yarn, not truncated": (1.5e5, 1.0, "yarn", {**YARN, "factor": 32.0, "truncate": False}),
}
HEAD = 128


def rotary(theta: float, fraction: float, scaling: str | None, settings: dict[str, Any]) -> Rotary:
    return Rotary(
        theta=theta,
        rotary_dim=int(HEAD * fraction),
        scaling=scaling,
        parameters=tuple(sorted(settings.items())),
    )


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, fraction, scaling, settings = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": scaling or "default",
            "rope_theta": theta,
            **settings,
        },
    )
    if fraction != 1.0:
        config.head_dim = int(HEAD * fraction)
    expected = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    found = inverse_frequencies(rotary(*CASES[case]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_worked_example() -> None:
    np.testing.assert_allclose(inverse_frequencies(Rotary(theta=10_000, rotary_dim=4)), [1.0, 0.01])


@pytest.mark.parametrize("scheme", ["longrope", "dynamic", "mrope", "proportional"])
def test_other_schemes_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"linear, llama3, yarn, got '{scheme}'"):
        inverse_frequencies(Rotary(theta=1e4, rotary_dim=8, scaling=scheme))
