"""The ring of index buffers: which arrays stay valid for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar_plugin.kv.plan import PinnedIndexRing

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


def plan(ring: PinnedIndexRing, count: int, first: int) -> list[torch.Tensor]:
    ring.begin_plan()
    return [ring.take([first + index] * 3) for index in range(count)]


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.int32), torch.arange(1, 4)],
)
def test_any_row_of_integers_is_taken(values: Any) -> None:
    taken = PinnedIndexRing().take(values)
    assert taken.tolist() == [1, 2, 3] and taken.dtype == torch.int32


def test_an_empty_row_is_taken() -> None:
    assert PinnedIndexRing().take([]).tolist() == []


@pytest.mark.parametrize("values", [[1.5], [2**31], np.array([0.5]), np.array([-(2**31) - 1])])
def test_what_does_not_fit_32_bits_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="integers of 32 bits"):
        PinnedIndexRing().take(values)


def test_takes_of_one_plan_share_nothing_however_many_there_are() -> None:
    arrays = plan(PinnedIndexRing(per_plan=2), 9, 10)
    assert [array[0].item() for array in arrays] == list(range(10, 19))
    assert len({array.data_ptr() for array in arrays}) == 9


def test_the_next_plan_leaves_the_arrays_of_this_one_alone() -> None:
    ring = PinnedIndexRing()
    first = plan(ring, 8, 0)
    plan(ring, 8, 100)
    assert [array.tolist() for array in first] == [[index] * 3 for index in range(8)]


def test_a_set_comes_round_again_after_depth_plans() -> None:
    ring = PinnedIndexRing(depth=2, per_plan=4)
    first, second, third = (plan(ring, 8, 0) for _ in range(3))
    assert [a.data_ptr() for a in third] == [a.data_ptr() for a in first]
    assert not {a.data_ptr() for a in first} & {a.data_ptr() for a in second}


def test_a_deeper_ring_keeps_arrays_longer() -> None:
    ring = PinnedIndexRing(depth=3)
    first = plan(ring, 1, 5)[0]
    plan(ring, 1, 6)
    plan(ring, 1, 7)
    assert first.tolist() == [5, 5, 5]
    plan(ring, 1, 8)
    assert first.tolist() == [8, 8, 8]


def test_a_ring_of_one_set_works() -> None:
    ring = PinnedIndexRing(depth=1)
    assert plan(ring, 1, 1)[0].data_ptr() == plan(ring, 1, 2)[0].data_ptr()


def test_a_row_longer_than_the_buffers_gets_a_larger_one() -> None:
    ring = PinnedIndexRing(numel=4, depth=1)
    ring.begin_plan()
    assert ring.take(range(5)).tolist() == list(range(5))
    assert ring.take(range(100)).tolist() == list(range(100))
    ring.begin_plan()
    grown = ring.take(range(8))
    assert grown.tolist() == list(range(8))
    ring.begin_plan()
    assert ring.take(range(8)).data_ptr() == grown.data_ptr()


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_buffers_are_pinned_and_a_plan_waits_for_the_copies() -> None:
    ring = PinnedIndexRing(depth=1)
    ring.begin_plan()
    taken = ring.take([7] * 1000)
    assert taken.is_pinned()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    copied = taken.to("cuda", non_blocking=True)
    ring.begin_plan()
    ring.take([9] * 1000)
    assert set(copied.tolist()) == {7}
