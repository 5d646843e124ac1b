"""The server's settings: every wrong value is refused by name before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.settings import Settings


def retention(**values: Any) -> dict[str, Any]:
    return {"retention": values}


def test_an_empty_table_bounds_nothing() -> None:
    assert Settings.from_mapping({}) == Settings(retention=None, kernels=None)


def test_the_protected_prefix_defaults_to_none_protected() -> None:
    settings = Settings.from_mapping(retention(context_budget=512))
    assert settings.retention == RetentionPolicy(512, 0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], "additional_config['mstar']"),
        ("retention", "additional_config['mstar']"),
        ({"retentoin": {}}, "retentoin"),
        ({"retention": 512}, "['retention']"),
        ({"retention": {}}, "context_budget"),
        (retention(context_budget=512, sink=4), "sink"),
        (retention(context_budget=True), "['context_budget']"),
        (retention(context_budget=512.0), "['context_budget']"),
        (retention(context_budget=float("nan")), "['context_budget']"),
        (retention(context_budget="512"), "['context_budget']"),
        (retention(context_budget=None), "['context_budget']"),
        (retention(context_budget=0), "['context_budget']"),
        (retention(context_budget=-1), "['context_budget']"),
        (retention(context_budget=2**63), "['context_budget']"),
        (retention(context_budget=1, protected_prefix=-1), "['protected_prefix']"),
        (retention(context_budget=1, protected_prefix=False), "['protected_prefix']"),
        (retention(context_budget=1, positions="rolled"), "['positions']"),
        (retention(context_budget=1, positions=True), "['positions']"),
        ({"kernels": "triton"}, "['kernels']"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Any, named: str) -> None:
    with pytest.raises(ValueError, match="got") as refused:
        Settings.from_mapping(values)
    assert named in str(refused.value)


def test_the_message_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(ValueError, match="whole number") as refused:
        Settings.from_mapping(retention(context_budget="9" * 100_000))
    assert len(str(refused.value)) < 300
