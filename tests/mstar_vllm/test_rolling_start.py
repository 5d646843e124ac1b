"""What rules rolling positions out at the start, on either platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

vllm_platforms = pytest.importorskip("vllm.platforms", reason="needs vLLM")

from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV, Rotary  # noqa: E402
from mstar_vllm.rolling_start import check_rolling  # noqa: E402
from mstar_vllm.settings import Settings  # noqa: E402

PLAIN = Rotary(theta=10000.0, rotary_dim=64)
BY_LENGTH = Rotary(theta=10000.0, rotary_dim=64, scaling="longrope")


def model(kind: LayerKind = LayerKind.FULL, **layer: Any) -> ModelKV:
    values: dict[str, Any] = {
        "index": 0,
        "kind": kind,
        "num_kv_heads": 2,
        "num_qo_heads": 4,
        "head_dim": 64,
        "rotary": PLAIN,
        **layer,
    }
    return ModelKV(architecture="TinyForCausalLM", layers=(LayerKV(**values),))


def config(cache_dtype: str = "auto") -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype))


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(is_cpu=lambda: False, device_name="cuda")
    monkeypatch.setattr(vllm_platforms, "current_platform", card)


@pytest.mark.parametrize(
    ("settings", "given", "cache", "named"),
    [
        (Settings(), None, "auto", "no adapter declares"),
        (Settings(), model(), "fp8", "a KV cache of fp8"),
        (Settings(), model(rotary=BY_LENGTH), "auto", "layer 0, where the rotary scheme"),
    ],
)
def test_refused_on_both_platforms(
    settings: Settings, given: ModelKV | None, cache: str, named: str, request: Any
) -> None:
    for fixture in (None, "on_card"):
        if fixture:
            request.getfixturevalue(fixture)
        with pytest.raises(ValueError, match=f"cannot keep positions 'rolling' with .*{named}"):
            check_rolling(config(cache), settings, given)


def test_sinks_and_flashinfer_are_refused_on_a_card_alone(request: Any) -> None:
    cases = [
        (Settings(kernels="flashinfer"), model(), "FlashInfer's kernels"),
        (Settings(), model(has_sinks=True), "attention sinks on CUDA"),
    ]
    for settings, given, _ in cases:
        check_rolling(config(), settings, given)
    request.getfixturevalue("on_card")
    check_rolling(config(), Settings(kernels="flash_attn"), model())
    for settings, given, named in cases:
        with pytest.raises(ValueError, match=named):
            check_rolling(config(), settings, given)


def test_layers_that_are_not_bounded_do_not_count() -> None:
    sliding = model(LayerKind.SLIDING, window_tokens=32, rotary=BY_LENGTH, has_sinks=True)
    check_rolling(config(), Settings(), sliding)
