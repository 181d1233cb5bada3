"""Bins and their arrangement over ranks, against plain loops that say what is meant."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.packing import plain_first_fit_decreasing
from pellucid.packing.plan import Bins, Cost, Packer, deal, first_fit_decreasing, level

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def test_first_fit_decreasing_by_hand() -> None:
    assert first_fit_decreasing(np.array([5, 3, 4, 9]), 8).lists() == [[3], [0, 1], [2]]


@given(LENGTHS, st.integers(1, 60))
def test_filling_bin_by_bin_is_first_fit_decreasing(lengths, capacity) -> None:
    expected = plain_first_fit_decreasing(lengths, capacity)
    assert first_fit_decreasing(np.array(lengths), capacity).lists() == expected


def test_a_bin_takes_the_largest_unit_within_size_and_cost() -> None:
    sizes = np.array([9, 6, 5, 4, 2, 1])
    packer = Packer(sizes, costs=sizes**2)
    first = packer.take_largest()
    assert (first.size, first.cost) == (9, 81)
    packer.start_bin(first)
    assert packer.fill(capacity=15, max_cost=81 + 17) == 81 + 16 + 1  # 6 and 5 fit, but cost 36 and 25
    assert packer.size_left == 6 + 5 + 2
    packer.align(3)
    assert packer.bins().lists() == [[0, 3, 5], [], []]
    assert packer.left() == [1, 2, 4]


def test_bins_know_their_sums_and_unfold_pieces() -> None:
    bins = Bins.from_lists([[2], [], [0, 1]])
    assert bins.sums(np.array([10, 20, 30])).tolist() == [30, 0, 30]
    pieces = Bins.from_lists([[4], [0, 3], [1, 2]])
    assert bins.expand(pieces).lists() == [[1, 2], [], [4, 0, 3]]


def test_cost_is_linear_and_quadratic() -> None:
    assert Cost(parity=40).of(np.array([10, 40])).tolist() == [40 * 12.5, 40 * 80]


@pytest.mark.parametrize("arrange", [deal, level])
@given(LENGTHS, st.integers(10, 60), st.integers(2, 5))
def test_arranging_keeps_the_cap_and_needs_no_more_steps_than_first_fit(
    arrange, lengths, capacity, num_ranks
) -> None:
    sizes = np.array(lengths)
    costs = Cost(parity=40).of(sizes)
    found = arrange(sizes, costs, capacity=capacity, num_ranks=num_ranks)
    bins = found.lists()
    assert sorted(unit for chosen in bins for unit in chosen) == list(range(len(lengths)))
    assert all(len(chosen) <= 1 or sizes[chosen].sum() <= capacity for chosen in bins)
    steps = [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]
    assert len(bins) % num_ranks == 0
    assert len(steps) <= -(-len(plain_first_fit_decreasing(lengths, capacity)) // num_ranks)
    assert found.lock_step_cost(costs, num_ranks) == sum(
        max(costs[chosen].sum() for chosen in step if chosen) for step in steps
    )


def test_dealing_gives_each_step_bins_of_like_cost_and_spreads_the_rest() -> None:
    """Bins 8, 7+1, 5+3, 4+2+1 of capacity 8 for 3 ranks: three of them, and the fourth in three parts."""
    sizes = np.array([8, 7, 5, 4, 3, 2, 1, 1])
    found = deal(sizes, Cost(parity=1000).of(sizes), capacity=8, num_ranks=3)
    assert [sorted(sizes[chosen].tolist()) for chosen in found.lists()] == [
        [8],
        [1, 7],
        [3, 5],
        [4],
        [2],
        [1],
    ]


def test_levelling_fills_all_ranks_to_the_cost_of_the_longest() -> None:
    """The longest costs 9·(9 + 9) = 162, a 3 costs 36: four of them come close. The other 8 are spread."""
    lengths = np.array([9] + [3] * 16)
    costs = Cost(parity=9).of(lengths)
    found = level(lengths, costs, capacity=12, num_ranks=3)
    assert found.sums(costs).reshape(-1, 3).tolist() == [[144, 162, 144], [108, 108, 72]]


def test_levelling_gives_every_rank_its_share_where_none_stands_out() -> None:
    """Twelve 3s and twelve 2s for 2 ranks in bins of 20: 60 tokens in two steps, not 40 and 20."""
    lengths = np.array([3] * 12 + [2] * 12)
    found = level(lengths, Cost(parity=1000).of(lengths), capacity=20, num_ranks=2)
    assert found.sums(lengths).tolist() == [15, 15, 15, 15]
