"""Which rank trains which bin at which micro step. Ranks wait for each other after every one.

    sum over micro steps of the dearest rank's cost     what a batch costs
    ... divided by the mean over ranks                  its imbalance, 1 at best

There are never more micro steps than the bins of first-fit decreasing need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from pellucid.packing.bins import Bins, Ints, Packer, first_fit_decreasing

_FEW_STEPS = 32
"""Beyond, the imbalance of dealing is below 1% at any rate, and levelling would take as long again."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Bins in the order of micro steps and, within a step, of ranks. Some may be empty."""

    bins: Bins
    lock_step_cost: int

    @classmethod
    def of(cls, bins: Bins, costs: Ints, num_ranks: int) -> "Arrangement":
        by_step = bins.sums(costs).reshape(-1, num_ranks)
        return cls(bins, int(by_step.max(axis=1).sum()))


def deal(sizes: Ints, costs: Ints, *, capacity: int, num_ranks: int) -> Arrangement:
    """The bins of first-fit decreasing by falling cost, one to each rank at a time.

    Where that leaves ranks without a bin in the last step, what is in the others is spread over all.
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
    """Step by step, the longest first, every rank is filled up to the same cost.

    For more than one rank, and units of which a larger one never costs less, as sequences are. Where there is
    no room to spare it may fail, and with many steps it gains nothing: then bins are dealt.
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
    """What is left for the last step is spread; None if it does not fit there."""
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
    """To the cost of a bin with an even share of what is left, or of the longest sequence if that is more."""
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
    """One step: the dearest unit first, each to the rank with the least cost; None if one fits nowhere."""
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
