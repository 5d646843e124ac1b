"""A request's policy is checked by name and never looser than the server's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm.policy import (
    PolicyError,
    bound_policy,
    check_keys,
    has_policy,
    policy_arguments,
    request_policy,
)
from mstar_vllm.positions import RollingPolicy

SERVER = RetentionPolicy(512, 64)
BUDGET, PREFIX = "mstar_context_budget", "mstar_protected_prefix"
POSITIONS = "mstar_positions"


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_a_request_without_a_policy_has_the_servers(extra: Any) -> None:
    assert not has_policy(extra)
    assert request_policy(extra, SERVER, 10) is SERVER
    assert request_policy(extra, None, 10) is None


def test_a_missing_prefix_is_the_servers() -> None:
    assert request_policy({BUDGET: 100}, SERVER, 10) == RetentionPolicy(100, 64)
    assert request_policy({BUDGET: 100}, None, 10) == RetentionPolicy(100, 0)


def test_a_missing_budget_is_what_the_servers_total_leaves() -> None:
    assert request_policy({PREFIX: 500}, SERVER, 10) == RetentionPolicy(76, 500)


def test_prompt_protects_the_whole_prompt() -> None:
    extra = {BUDGET: 100, PREFIX: "prompt"}
    assert request_policy(extra, SERVER, 300) == RetentionPolicy(100, 300)


@pytest.mark.parametrize("value", [True, 1.0, float("inf"), -1, 0, 2**63, "512", None, [1]])
def test_a_wrong_budget_is_refused_by_name(value: Any) -> None:
    if value is None:
        with pytest.raises(PolicyError, match=BUDGET):
            request_policy({BUDGET: None}, None, 10)
        return
    with pytest.raises(PolicyError, match=BUDGET) as refused:
        request_policy({BUDGET: value}, SERVER, 10)
    assert refused.value.parameter == BUDGET


@pytest.mark.parametrize("value", [True, 1.5, -1, 2**63, "promtp", [1]])
def test_a_wrong_prefix_is_refused_by_name(value: Any) -> None:
    with pytest.raises(PolicyError, match=PREFIX) as refused:
        request_policy({BUDGET: 10, PREFIX: value}, SERVER, 10)
    assert refused.value.parameter == PREFIX


@pytest.mark.parametrize(
    "extra", [{BUDGET: 513}, {BUDGET: 512, PREFIX: 65}, {PREFIX: 576}, {PREFIX: "prompt"}]
)
def test_more_than_the_servers_total_is_refused_with_both_numbers(extra: Any) -> None:
    with pytest.raises(PolicyError, match="server"):
        request_policy(extra, SERVER, 600)


def test_a_prefix_alone_needs_a_server_policy() -> None:
    with pytest.raises(PolicyError, match=BUDGET):
        request_policy({PREFIX: 4}, None, 10)


def test_an_unknown_key_of_ours_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="mstar_budget") as refused:
        check_keys({"mstar_budget": 10, "other": 1})
    assert refused.value.parameter == "mstar_budget"
    check_keys({BUDGET: 1, PREFIX: 2, "other": 3})


@given(budget=st.integers(1, 600), prefix=st.integers(0, 600))
def test_an_accepted_policy_is_never_looser_than_the_server(budget: int, prefix: int) -> None:
    try:
        policy = request_policy({BUDGET: budget, PREFIX: prefix}, SERVER, 0)
    except PolicyError:
        assert budget + prefix > 576
        return
    assert policy is not None
    assert policy.context_budget + policy.protected_prefix <= 576


ROLLING = RollingPolicy(512, 64)


def test_positions_are_the_servers_unless_the_request_says() -> None:
    assert request_policy({BUDGET: 100}, ROLLING, 10) == RollingPolicy(100, 64)
    absolute = {BUDGET: 100, POSITIONS: "absolute"}
    assert request_policy(absolute, ROLLING, 10) == RetentionPolicy(100, 64)


def test_with_nothing_protected_positions_make_no_difference() -> None:
    assert request_policy({PREFIX: 0}, ROLLING, 10) == RetentionPolicy(576, 0)


@pytest.mark.parametrize("server", [None, SERVER])
def test_rolling_positions_need_a_server_that_has_them(server: RetentionPolicy | None) -> None:
    with pytest.raises(PolicyError, match="only where the server protects") as refused:
        request_policy({BUDGET: 100, PREFIX: 4, POSITIONS: "rolling"}, server, 10)
    assert refused.value.parameter == POSITIONS


def test_a_rolling_prefix_is_at_most_what_the_server_reserved_copies_for() -> None:
    own = {BUDGET: 100, PREFIX: 65}
    with pytest.raises(PolicyError, match="must not exceed the server's 64 with rolling"):
        request_policy({**own, POSITIONS: "rolling"}, ROLLING, 10)
    assert request_policy(own, ROLLING, 10) == RetentionPolicy(100, 65)
    assert request_policy({PREFIX: "prompt"}, ROLLING, 200) == RetentionPolicy(376, 200)


@pytest.mark.parametrize("value", [True, 1, "rolled", ["rolling"], float("nan")])
def test_wrong_positions_are_refused_by_name(value: Any) -> None:
    with pytest.raises(PolicyError, match="must be one of absolute, rolling") as refused:
        request_policy({BUDGET: 100, POSITIONS: value}, ROLLING, 10)
    assert refused.value.parameter == POSITIONS


def test_a_bound_policy_is_read_back_as_it_was_written() -> None:
    for policy in (ROLLING, SERVER, RetentionPolicy(7, 0)):
        assert bound_policy(policy_arguments(policy)) == policy
