"""Each token of a batch sees exactly the positions of the rule, however the batch was cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import Batch, batch_of

from mstar_plugin.kv.config import RetentionPolicy
from mstar_plugin.kv.retention import visible_positions
from mstar_vllm.visibility import (
    UNBOUNDED,
    RowLimits,
    compact_tables,
    limits_of,
    split_rows,
    transform,
)

POLICIES = st.one_of(
    st.none(),
    st.builds(RetentionPolicy, st.integers(1, 90), st.integers(0, 70)),
)


def seen_by_tokens(batch: Batch, block: int) -> list[list[int]]:
    """For each token in order, the slots that its bottom-right causal row shows."""
    seen = []
    starts = batch.query_start_loc.tolist()
    for row in range(batch.num_reqs):
        query_len = starts[row + 1] - starts[row]
        for token in range(query_len):
            length = int(batch.seq_lens[row]) - query_len + token + 1
            columns = [slot // block for slot in range(length)]
            blocks = batch.block_table_tensor[row, columns].tolist()
            seen.append([b * block + slot % block for slot, b in enumerate(blocks)])
    return seen


def limits_for(policies: list[RetentionPolicy | None], page: int) -> RowLimits:
    pairs = np.array([limits_of(policy, page) for policy in policies], dtype=np.int64)
    return RowLimits(dense=pairs[:, 0], head_pages=pairs[:, 1], page_tokens=page)


def expected(
    query_lens: list[int],
    seq_lens: list[int],
    policies: list[RetentionPolicy | None],
    page: int,
    block: int,
) -> list[list[int]]:
    seen = []
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(length - query, length):
            policy = policies[request]
            ranges = (
                [range(position + 1)]
                if policy is None
                else visible_positions(
                    position, policy.context_budget, policy.protected_prefix, page
                )
            )
            first = 1000 * request * block
            seen.append([first + p for positions in ranges for p in positions])
    return seen


@given(data=st.data(), ratio=st.sampled_from([1, 2, 4]), block=st.sampled_from([2, 4, 8]))
@settings(max_examples=150, deadline=None)
def test_each_token_sees_what_the_rule_says(data: st.DataObject, ratio: int, block: int) -> None:
    page = block * ratio
    requests = data.draw(
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(0, 150), POLICIES), min_size=1, max_size=4
        )
    )
    query_lens = [query for query, _, _ in requests]
    seq_lens = [query + stored for query, stored, _ in requests]
    policies = [policy for _, _, policy in requests]
    batch = batch_of(query_lens, seq_lens, block)
    visible = transform(batch, limits_for(policies, page), block)  # type: ignore[arg-type]
    assert seen_by_tokens(visible, block) == expected(query_lens, seq_lens, policies, page, block)  # type: ignore[arg-type]


@given(
    stored=st.integers(0, 400),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    policy=st.builds(RetentionPolicy, st.integers(1, 90), st.integers(0, 70)),
)
@settings(max_examples=100, deadline=None)
def test_chunking_does_not_change_what_a_token_sees(
    stored: int, cuts: list[int], policy: RetentionPolicy
) -> None:
    limits = RowLimits.of_policy(policy, 8)
    whole = batch_of([sum(cuts)], [stored + sum(cuts)], 8)
    together = seen_by_tokens(transform(whole, limits, 8), 8)  # type: ignore[arg-type]
    apart: list[list[int]] = []
    for cut in cuts:
        stored += cut
        chunk = batch_of([cut], [stored], 8)
        apart += seen_by_tokens(transform(chunk, limits, 8), 8)  # type: ignore[arg-type]
    assert apart == together


def test_the_worked_split_has_three_rows() -> None:
    limits = RowLimits(dense=31, head_pages=1, page_tokens=8)
    rows = split_rows(np.array([20]), np.array([50]), limits)
    assert rows.released.tolist() == [0, 1, 2]
    assert rows.query_lens.tolist() == [9, 8, 3]
    assert rows.seq_lens.tolist() == [39, 39, 34]


def test_a_compact_table_leaves_out_the_released_columns() -> None:
    limits = RowLimits(dense=31, head_pages=1, page_tokens=8)
    rows = split_rows(np.array([1]), np.array([48]), limits)
    tables = compact_tables(np.arange(10, 18, dtype=np.int32)[None], rows, limits, 8)
    assert tables.tolist() == [[10, 13, 14, 15]]


@pytest.mark.parametrize("limits", [None, RowLimits(dense=64, head_pages=0, page_tokens=16)])
def test_a_batch_that_releases_nothing_comes_back_as_the_same_object(
    limits: RowLimits | None,
) -> None:
    batch = batch_of([1, 1, 30], [80, 5, 40], 16)
    assert transform(batch, limits, 16) is batch  # type: ignore[arg-type]


def test_one_token_more_releases_a_page() -> None:
    limits = RowLimits(dense=64, head_pages=0, page_tokens=16)
    batch = batch_of([1], [81], 16)
    visible = transform(batch, limits, 16)  # type: ignore[arg-type]
    assert visible is not batch
    assert visible.seq_lens.tolist() == [65]


def test_padding_rows_stay_empty() -> None:
    limits = RowLimits(dense=np.array([4, UNBOUNDED]), head_pages=np.array([0, 0]), page_tokens=4)
    batch = batch_of([1, 0], [20, 0], 4)
    visible = transform(batch, limits, 4)  # type: ignore[arg-type]
    assert visible.seq_lens.tolist() == [8, 0]
    assert visible.query_start_loc.tolist() == [0, 1, 1]


def test_rows_keep_whether_their_request_is_prefilling() -> None:
    limits = RowLimits(dense=8, head_pages=0, page_tokens=4)
    visible = transform(batch_of([9, 1], [20, 3], 4), limits, 4)  # type: ignore[arg-type]
    assert visible.is_prefilling.tolist() == [True, True, True, False]
    assert visible.max_query_len == 4
    assert visible.num_reqs == 4
