"""The transform on device gives the rows that the transform on the host gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM")

from device_batches import DEVICE, MAX_LEN, RUNS_KERNELS, batch_on
from vllm.v1.attention.backend import CommonAttentionMetadata

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import rows, rows_v2
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.device_limits import DeviceBatchLimits, DeviceLimits
from mstar_vllm.device_rows import Pages, offsets_of
from mstar_vllm.device_visibility import (
    BatchShape,
    DeviceVisibility,
)
from mstar_vllm.visibility import (
    UNBOUNDED,
    RowLimits,
    compact_tables,
    limits_of,
    split_rows,
)

pytestmark = [pytest.mark.vllm, *RUNS_KERNELS]
MAX_REQUESTS = 8
POLICIES = st.builds(RetentionPolicy, st.integers(1, 90), st.integers(0, 70))
EXAMPLES = settings(max_examples=40 if RUNS_KERNELS else 15, deadline=None)


@dataclass(frozen=True)
class Setting:
    policy: RetentionPolicy | None
    pages: Pages

    def visibility(self, drafts: int = 0, plans_on_host: bool = False) -> DeviceVisibility:
        policy = self.policy
        spec = RetentionSpec(
            block_size=self.pages.block_tokens,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.bfloat16,
            context_budget=policy.context_budget if policy else None,
            protected_prefix=policy.protected_prefix if policy else 0,
            release_tokens=self.pages.page_tokens,
        )
        shape = BatchShape(
            pages=self.pages,
            max_requests=MAX_REQUESTS,
            max_model_len=MAX_LEN,
            drafts=drafts,
            plans_on_host=plans_on_host,
        )
        return DeviceVisibility(shape, DeviceBatchLimits(spec, MAX_REQUESTS, DEVICE), DEVICE)

    def limits(self, own: list[RetentionPolicy | None]) -> RowLimits:
        pairs = [limits_of(policy or self.policy, self.pages.page_tokens) for policy in own]
        both = np.array(pairs, dtype=np.int64)
        return RowLimits(
            dense=both[:, 0], head_pages=both[:, 1], page_tokens=self.pages.page_tokens
        )


@st.composite
def any_setting(draw: st.DrawFn, with_policy: bool = True) -> Setting:
    block = draw(st.sampled_from([4, 8]))
    pages = Pages(page_tokens=block * draw(st.sampled_from([1, 2, 3])), block_tokens=block)
    return Setting(draw(POLICIES) if with_policy else None, pages)


@st.composite
def lengths(draw: st.DrawFn, max_query: int, min_size: int = 1) -> tuple[list[int], list[int]]:
    pairs = draw(
        st.lists(
            st.tuples(st.integers(1, max_query), st.integers(0, MAX_LEN - max_query)),
            min_size=min_size,
            max_size=MAX_REQUESTS - 2,
        )
    )
    return [query for query, _ in pairs], [query + before for query, before in pairs]


def rows_of(seen: CommonAttentionMetadata, block: int) -> list[tuple[int, int, list[int]]]:
    """Each row that holds tokens: query length, visible tokens, table."""
    starts = seen.query_start_loc.tolist()
    found = []
    for row in range(seen.num_reqs):
        query, length = starts[row + 1] - starts[row], int(seen.seq_lens[row])
        if query:
            table = seen.block_table_tensor[row, : -(-length // block)].tolist()
            found.append((query, length, table))
    return found


def expected_rows(
    query_lens: list[int], seq_lens: list[int], limits: RowLimits, block: int
) -> list[tuple[int, int, list[int]]]:
    lens = np.array(seq_lens, dtype=np.int64)
    split = split_rows(np.array(query_lens, dtype=np.int64), lens, limits)
    width = -(-MAX_LEN // block)
    tables = 1000 * np.arange(len(lens))[:, None] + np.arange(width)
    compact = compact_tables(tables.astype(np.int32), split, limits, block)
    return [
        (int(query), int(length), compact[row, : -(-int(length) // block)].tolist())
        for row, (query, length) in enumerate(zip(split.query_lens, split.seq_lens, strict=True))
    ]


@given(setting=any_setting(), batch=lengths(1), padding=st.integers(0, 2))
@EXAMPLES
def test_decode_rows_are_the_hosts(
    setting: Setting, batch: tuple[list[int], list[int]], padding: int
) -> None:
    visibility = setting.visibility(plans_on_host=True)
    block = setting.pages.block_tokens
    seen = visibility.visible(batch_on(DEVICE, *batch, block, padding=padding))
    limits = setting.limits([None] * len(batch[0]))
    assert rows_of(seen, block) == expected_rows(*batch, limits, block)
    assert seen.num_reqs == len(batch[0]) + padding
    assert seen.seq_lens_cpu_upper_bound is not None
    assert seen.seq_lens_cpu_upper_bound.tolist() == seen.seq_lens.tolist()
    assert seen.max_seq_len >= int(seen.seq_lens.max())


@given(setting=any_setting(), batch=lengths(150))
@EXAMPLES
def test_chunks_are_cut_as_on_the_host(
    setting: Setting, batch: tuple[list[int], list[int]]
) -> None:
    block = setting.pages.block_tokens
    given_batch = batch_on(DEVICE, *batch, block)
    seen = setting.visibility().visible(given_batch)
    limits = setting.limits([None] * len(batch[0]))
    assert rows_of(seen, block) == expected_rows(*batch, limits, block)
    assert seen.query_start_loc_cpu.tolist() == seen.query_start_loc.tolist()
    assert seen.max_query_len == int(np.diff(seen.query_start_loc_cpu).max())
    if seen is not given_batch and max(batch[0]) > 1:
        assert seen.seq_lens_cpu_upper_bound is not None
        assert seen.seq_lens_cpu_upper_bound.tolist() == seen.seq_lens.tolist()


@given(data=st.data(), setting=any_setting(), drafts=st.integers(1, 9))
@EXAMPLES
def test_drafts_are_cut_where_the_device_says(
    data: st.DataObject, setting: Setting, drafts: int
) -> None:
    query_lens, seq_lens = data.draw(lengths(1 + drafts))
    rejected = [data.draw(st.integers(0, drafts)) for _ in seq_lens]
    upper = [length + more for length, more in zip(seq_lens, rejected, strict=True)]
    block = setting.pages.block_tokens
    visibility = setting.visibility(drafts)
    given_batch = batch_on(DEVICE, query_lens, seq_lens, block, upper=upper, padding=1)
    given_batch.max_query_len = max(2, max(query_lens))
    seen = visibility.visible(given_batch)
    limits = setting.limits([None] * len(seq_lens))
    assert rows_of(seen, block) == expected_rows(query_lens, seq_lens, limits, block)
    assert seen.num_reqs == given_batch.num_reqs * (1 + -(-drafts // setting.pages.page_tokens))


@given(data=st.data(), setting=any_setting(), drafts=st.integers(1, 4))
@EXAMPLES
def test_chunks_beside_drafts_are_cut_where_the_device_says(
    data: st.DataObject, setting: Setting, drafts: int
) -> None:
    query_lens, seq_lens = data.draw(lengths(120))
    query_lens[0], seq_lens[0] = query_lens[0] + 5, seq_lens[0] + 5
    upper = [length + data.draw(st.integers(0, drafts)) for length in seq_lens]
    block = setting.pages.block_tokens
    for plans_on_host in (False, True):
        visibility = setting.visibility(drafts, plans_on_host)
        seen = visibility.visible(batch_on(DEVICE, query_lens, seq_lens, block, upper=upper))
        limits = setting.limits([None] * len(seq_lens))
        assert rows_of(seen, block) == expected_rows(query_lens, seq_lens, limits, block)


def own_policies(data: st.DataObject, setting: Setting, count: int) -> list[RetentionPolicy | None]:
    """Beside a server's policy requests see no more than it allows."""
    policies = POLICIES
    if setting.policy is not None:
        server = setting.policy
        most = server.context_budget + server.protected_prefix
        policies = st.integers(1, most).flatmap(
            lambda budget: st.builds(
                RetentionPolicy, st.just(budget), st.integers(0, most - budget)
            )
        )
    return [data.draw(st.one_of(st.none(), policies)) for _ in range(count)]


ANY_SERVER = st.booleans().flatmap(lambda with_policy: any_setting(with_policy=with_policy))


@given(data=st.data(), setting=ANY_SERVER, max_query=st.sampled_from([1, 90]))
@EXAMPLES
def test_requests_bring_policies_on_the_first_runner(
    data: st.DataObject, setting: Setting, max_query: int
) -> None:
    query_lens, seq_lens = data.draw(lengths(max_query))
    own = own_policies(data, setting, len(seq_lens))
    block = setting.pages.block_tokens
    rows._published = own
    try:
        seen = setting.visibility().visible(
            batch_on(DEVICE, query_lens, seq_lens, block, padding=1)
        )
    finally:
        rows._published = None
    limits = setting.limits(own)
    assert rows_of(seen, block) == expected_rows(query_lens, seq_lens, limits, block)


@given(data=st.data(), setting=ANY_SERVER, max_query=st.sampled_from([1, 90]))
@EXAMPLES
def test_requests_bring_policies_on_the_second_runner(
    data: st.DataObject, setting: Setting, max_query: int
) -> None:
    query_lens, seq_lens = data.draw(lengths(max_query))
    slots = data.draw(st.permutations(range(MAX_REQUESTS)))[: len(seq_lens)]
    policies = rows_v2.SlotPolicies(MAX_REQUESTS)
    visibility = setting.visibility()
    block = setting.pages.block_tokens
    for _ in range(2):
        own = own_policies(data, setting, len(seq_lens))
        for slot, policy in zip(slots, own, strict=True):
            policies.by_slot[slot] = policy
        policies.version += 1
        rows_v2._published = rows_v2.BatchPolicies(
            policies=policies,
            slots=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
            slots_on_host=np.array(slots),
        )
        try:
            seen = visibility.visible(batch_on(DEVICE, query_lens, seq_lens, block, padding=1))
        finally:
            rows_v2._published = None
        limits = setting.limits(own)
        assert rows_of(seen, block) == expected_rows(query_lens, seq_lens, limits, block)


@pytest.mark.parametrize("query_lens", [[1, 1], [40, 1]])
def test_nothing_is_launched_where_nothing_is_bounded(query_lens: list[int]) -> None:
    setting = Setting(None, Pages(page_tokens=16, block_tokens=16))
    batch = batch_on(DEVICE, query_lens, [300, 200], 16)
    assert setting.visibility().visible(batch) is batch


def test_a_prefill_that_releases_nothing_is_left_alone() -> None:
    setting = Setting(RetentionPolicy(64, 16), Pages(page_tokens=16, block_tokens=16))
    batch = batch_on(DEVICE, [40, 30], [90, 96], 16)
    assert setting.visibility().visible(batch) is batch


@pytest.mark.parametrize("drafts", [0, 3])
def test_rows_of_a_servers_policy_never_move(drafts: int) -> None:
    setting = Setting(RetentionPolicy(64, 16), Pages(page_tokens=16, block_tokens=16))
    visibility = setting.visibility(drafts)
    addresses = set()
    for length in (5, 96, 97, 300):
        query = 1 + drafts
        batch = batch_on(DEVICE, [query] * 4, [length] * 4, 16, padding=2)
        seen = visibility.visible(batch)
        visibility.visible(batch_on(DEVICE, [60], [360], 16))
        addresses.add(
            (
                seen.block_table_tensor.data_ptr(),
                seen.block_table_tensor.stride(0),
                seen.seq_lens.data_ptr(),
                seen.query_start_loc.data_ptr() if drafts else 0,
                seen.num_reqs,
            )
        )
    assert len(addresses) == 1


def rule(dense: int, page: int) -> DeviceLimits:
    host = RowLimits(dense=dense, head_pages=1, page_tokens=page)
    return DeviceLimits(host, columns=torch.zeros(3, 1, dtype=torch.int32))


def test_a_token_sees_what_the_worked_example_says() -> None:
    stored = np.array([0, 39, 41], dtype=np.int32)
    assert rule(dense=31, page=8).visible(stored).tolist() == [0, 39, 33]


@given(
    st.sampled_from([8, 16, 48]),
    st.lists(st.tuples(st.integers(0, 400), st.just(UNBOUNDED) | st.integers(1, 300)), min_size=1),
)
def test_tokens_of_own_limits_see_as_many_as_their_rows(
    page: int, tokens: list[tuple[int, int]]
) -> None:
    stored, dense = np.array(tokens).T
    own = DeviceLimits(RowLimits(dense, np.ones_like(dense), page), torch.zeros(3, 1), per_row=True)
    rows = split_rows(np.minimum(stored, 1), stored, own.host)
    assert own.visible(stored.astype(np.int32)).tolist() == rows.seq_lens.tolist()


def test_rows_are_numbered_within_their_request() -> None:
    assert offsets_of(np.array([0, 0, 1, 1, 1, 3])).tolist() == [0, 1, 0, 1, 2, 0]


def test_possible_rows_are_enough_for_every_alignment() -> None:
    query, stored = np.array([17, 1]), np.array([1000, 1000])
    assert rule(dense=10, page=16).possible(query, stored).tolist() == [0, 0, 1]
