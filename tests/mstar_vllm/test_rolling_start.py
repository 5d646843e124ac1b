"""What rules rolling positions out at the start, on either platform."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

vllm_platforms = pytest.importorskip("vllm.platforms", reason="needs vLLM")

from mstar_plugin.kv.config import RetentionPolicy  # noqa: E402
from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV, Rotary  # noqa: E402
from mstar_vllm.positions import RollingPolicy  # noqa: E402
from mstar_vllm.report import positions_shown  # noqa: E402
from mstar_vllm.rolling_start import choose_positions  # noqa: E402
from mstar_vllm.serving import ServingPlan  # noqa: E402
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


def refuses(named: str, given: ModelKV | None, cache: str = "auto", kernels: Any = None) -> None:
    """Refused where it was asked for; where nothing was, absolute for the reason named."""
    asked = Settings(positions="rolling", kernels=kernels)
    with pytest.raises(ValueError, match=f"cannot keep positions 'rolling' with .*{named}"):
        choose_positions(config(cache), asked, given)
    chosen, why = choose_positions(config(cache), Settings(kernels=kernels), given)
    assert chosen == "absolute" and why is not None and named in why
    told = Settings(positions="absolute", kernels=kernels)
    assert choose_positions(config(cache), told, given) == ("absolute", None)


def rolls(given: ModelKV, kernels: Any = None) -> None:
    for positions in (None, "rolling"):
        settings = Settings(positions=positions, kernels=kernels)
        assert choose_positions(config(), settings, given) == ("rolling", None)


@pytest.mark.parametrize(
    ("given", "cache", "named"),
    [
        (None, "auto", "no adapter declares"),
        (model(), "fp8", "a KV cache of fp8"),
        (model(rotary=BY_LENGTH), "auto", "layer 0, where the rotary scheme"),
        (model(rotary=None), "auto", "without rotary positions"),
    ],
)
def test_refused_on_both_platforms(
    given: ModelKV | None, cache: str, named: str, request: Any
) -> None:
    for fixture in (None, "on_card"):
        if fixture:
            request.getfixturevalue(fixture)
        refuses(named, given, cache)


def test_the_report_says_why_positions_do_not_roll() -> None:
    policy = RetentionPolicy(256, 4)
    common: dict[str, Any] = {"settings": Settings(), "adapter": "mine", "model": model()}
    why = ServingPlan(**common, retention=policy, obstacle=None, not_rolling="attention sinks")
    assert positions_shown(why) == "absolute (because of attention sinks)"
    rolls = ServingPlan(**common, retention=RollingPolicy(256, 4), obstacle=None)
    assert positions_shown(rolls) == "rolling"


@pytest.mark.parametrize("family", [100, 110])
def test_the_kernel_for_large_heads_of_new_cards_does_not_roll(
    family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(
        is_cpu=lambda: False, is_device_capability_family=lambda asked: asked == family
    )
    monkeypatch.setattr(vllm_platforms, "current_platform", card)
    refuses("FlashAttention 4's kernel for heads of 256", model(head_dim=256))
    rolls(model(head_dim=128))


def test_layers_that_share_keys_do_not_roll_on_cpu(request: Any) -> None:
    first = model().layers[0]
    both = replace(model(), layers=(first, replace(first, index=1, shares_kv_with=0)))
    refuses("layers that read another layer's keys on CPU", both)
    request.getfixturevalue("on_card")
    rolls(both)


def test_sinks_and_flashinfer_are_refused_on_a_card_alone(request: Any) -> None:
    rolls(model(), "flashinfer")
    rolls(model(has_sinks=True))
    request.getfixturevalue("on_card")
    rolls(model(), "flash_attn")
    refuses("FlashInfer's kernels", model(), kernels="flashinfer")
    refuses("attention sinks on CUDA", model(has_sinks=True))


def test_layers_that_are_not_bounded_do_not_count() -> None:
    sliding = model(LayerKind.SLIDING, window_tokens=32, rotary=BY_LENGTH, has_sinks=True)
    rolls(sliding)
