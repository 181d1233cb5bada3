"""Assigns bins to ranks and micro steps. Ranks wait for each other after every micro step.

    sum over micro steps of the costliest rank's cost   cost of a batch
    ... divided by the mean over ranks                  its imbalance, 1 at best

There are never more micro steps than the bins of first-fit decreasing need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from pellucid.packing.bins import Bins, Ints, Packer, first_fit_decreasing

_FEW_STEPS = 32
"""Most micro steps that are levelled. With more, dealing is within 1% of balance, and levelling doubles the
time of planning."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Bins in the order of micro steps and, within a step, of ranks. Bins may be empty."""

    bins: Bins
    lock_step_cost: int

    @classmethod
    def of(cls, bins: Bins, costs: Ints, num_ranks: int) -> "Arrangement":
        by_step = bins.sums(costs).reshape(-1, num_ranks)
        return cls(bins, int(by_step.max(axis=1).sum()))


def deal(sizes: Ints, costs: Ints, *, capacity: int, num_ranks: int) -> Arrangement:
    """Deals the bins of first-fit decreasing to the ranks by falling cost, one to each rank per step.

    If ranks are left without a bin in the last step, its units are spread over all ranks.
    """
    bins = first_fit_decreasing(sizes, capacity)
    lists = bins.lists()
    falling = [lists[index] for index in np.argsort(-bins.sums(costs), kind="stable").tolist()]
    if num_missing := -len(falling) % num_ranks:
        start = len(falling) - len(falling) % num_ranks
        units = [unit for chosen in falling[start:] for unit in chosen]
        last = _spread(units, sizes, costs, capacity, num_ranks)
        falling[start:] = last if last is not None else [*falling[start:], *([] for _ in range(num_missing))]
    return Arrangement.of(Bins.from_lists(falling), costs, num_ranks)


def level(lengths: Ints, costs: Ints, *, capacity: int, num_ranks: int) -> Arrangement:
    """Fills every rank up to the same cost, step by step, the longest sequences first.

    For more than one rank, and units of which a larger one never costs less, as sequences are. Levelling may
    fail if bins are tight, and gains nothing with many steps: then bins are dealt.
    """
    fewest = -(-int(np.minimum(lengths, capacity).sum()) // (capacity * num_ranks))
    levelled = _level(lengths, costs, capacity, num_ranks, fewest) if fewest <= _FEW_STEPS else None
    if levelled is not None:
        return levelled
    dealt = deal(lengths, costs, capacity=capacity, num_ranks=num_ranks)
    num_steps = len(dealt.bins) // num_ranks
    if fewest < num_steps <= _FEW_STEPS:
        levelled = _level(lengths, costs, capacity, num_ranks, num_steps)
    return dealt if levelled is None else min(levelled, dealt, key=lambda found: found.lock_step_cost)


def _level(lengths: Ints, costs: Ints, capacity: int, num_ranks: int, num_steps: int) -> Arrangement | None:
    """Levels all steps but the last, and spreads the rest over the last; None if it does not fit there."""
    packer = Packer(lengths, costs)
    for num_left in range(num_steps, 1, -1):
        share = min(capacity, packer.size_left // (num_left * num_ranks))
        _level_step(packer, share, capacity, num_ranks)
    last = _spread(packer.left(), lengths, costs, capacity, num_ranks)
    if last is None:
        return None
    bins = packer.bins()
    return Arrangement.of(bins.plus(Bins.from_lists(last)) if any(last) else bins, costs, num_ranks)


def _level_step(packer: Packer, share: int, capacity: int, num_ranks: int) -> None:
    """Fills bins to the cost of an even share of the tokens left, or of the longest sequence if higher."""
    dearest, other = packer.take_largest(), packer.take_largest()
    if dearest is None:
        return
    max_cost = dearest.cost
    if other is not None:
        packer.start_bin(other)
        max_cost = max(max_cost, packer.fill(share))
        packer.fill(capacity, max_cost)
    packer.start_bin(dearest)
    packer.fill(capacity, max_cost)
    for _ in range(num_ranks - 2):
        if (first := packer.take_largest()) is not None:
            packer.start_bin(first)
            packer.fill(capacity, max_cost)
    packer.align(num_ranks)


def _spread(
    units: Sequence[int], sizes: Ints, costs: Ints, capacity: int, num_ranks: int
) -> list[list[int]] | None:
    """Gives units, the costliest first, to the rank with the least cost; None if one fits nowhere."""
    chosen: list[list[int]] = [[] for _ in range(num_ranks)]
    room = [capacity] * num_ranks
    heap = [(0, rank) for rank in range(num_ranks)]
    for unit in sorted(units, key=lambda unit: -costs[unit]):
        size, full = int(sizes[unit]), []
        while heap:
            cost, rank = heappop(heap)
            if size <= room[rank] or not chosen[rank]:
                break
            full.append((cost, rank))
        else:
            return None
        chosen[rank].append(unit)
        room[rank] -= size
        for entry in (*full, (cost + int(costs[unit]), rank)):
            heappush(heap, entry)
    return chosen
