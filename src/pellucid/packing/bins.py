"""Bins of sequences, and their arrangement over ranks and micro steps.

A bin is filled with the largest unit that fits until none does. A unit is a sequence, or several of a group
that are packed together. First-fit decreasing usually goes unit by unit: the largest first, each into the
first bin with room. This module goes bin by bin, which gives the same bins and needs no search over bins,
only one over the distinct sizes left.

Ranks wait for each other after every micro step. There are never more micro steps than the bins of first-fit
decreasing need.

    sum over micro steps of the costliest rank's cost   cost of a batch in lock step
    ... divided by the mean over ranks                  its imbalance, 1 at best
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bins:
    """units [3, 0, 1, 2], bounds [0, 1, 3, 4]: the bins [3], [0, 1] and [2]. A bin may be empty."""

    units: Ints
    bounds: Ints

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> "Bins":
        units = np.array([unit for chosen in lists for unit in chosen], np.int64)
        return cls(units, np.cumsum([0, *map(len, lists)]))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def lists(self) -> list[list[int]]:
        units, bounds = self.units.tolist(), self.bounds.tolist()
        return [units[start:stop] for start, stop in pairwise(bounds)]

    def sums(self, values: Ints) -> Ints:
        """Sums the units' values per bin."""
        return np.diff(np.concatenate([[0], np.cumsum(values[self.units])])[self.bounds])

    def lock_step_cost(self, costs: Ints, num_ranks: int) -> int:
        """Adds up the costliest bins of the micro steps; bins lie in order of steps, then of ranks."""
        return int(self.sums(costs).reshape(-1, num_ranks).max(axis=1).sum())

    def numbers(self) -> Ints:
        """Returns the index of each unit's bin."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    def expand(self, pieces: "Bins") -> "Bins":
        """Turns bins of pieces into bins of the units in those pieces."""
        sizes = np.diff(pieces.bounds)[self.units]
        ends = np.cumsum(sizes)
        shifts = np.repeat(pieces.bounds[self.units] - (ends - sizes), sizes)
        return Bins(pieces.units[np.arange(len(shifts)) + shifts], np.concatenate([[0], ends])[self.bounds])


class Unit(NamedTuple):
    position: int
    """Rank by falling size; units of one size keep their order."""

    size: int
    cost: int


class Packer:
    """Units not yet packed, and the bins made so far. A larger unit costs no less than a smaller one.

    Each distinct size stores the position of its next unit; a size that is used up links to the next smaller.
    """

    def __init__(self, sizes: Ints, costs: Ints) -> None:
        self._order = np.argsort(-sizes, kind="stable")
        falling = sizes[self._order]
        starts = np.flatnonzero(np.diff(falling, prepend=-1))
        # Negative and hence rising, for bisect.
        self._sizes: list[int] = (-falling[starts]).tolist()
        self._costs: list[int] = (-costs[self._order[starts]]).tolist()
        self._next: list[int] = starts.tolist()
        self._stop: list[int] = [*self._next[1:], len(sizes)]
        self._link = list(range(len(starts) + 1))
        self._taken: list[int] = []
        self._starts: list[int] = []
        self._size = self._cost = 0
        self.size_left = int(sizes.sum())

    def take_largest(self) -> Unit | None:
        """Takes the largest unit left, to start a bin with, whatever its size; None if no unit is left."""
        link = self._link
        at = link[0]
        while link[at] != at:
            at = link[at]
        link[0] = at
        if at == len(self._sizes):
            return None
        position = self._next[at]
        self._next[at] = position + 1
        if position + 1 == self._stop[at]:
            link[at] = at + 1
        self.size_left += self._sizes[at]
        return Unit(position, -self._sizes[at], -self._costs[at])

    def start_bin(self, first: Unit) -> None:
        self._starts.append(len(self._taken))
        self._taken.append(first.position)
        self._size, self._cost = first.size, first.cost

    def fill(self, capacity: int, max_cost: int | None = None) -> int:
        """Adds the largest unit within both limits to the last bin until none fits; returns its cost."""
        sizes, costs, link, num_sizes = self._sizes, self._costs, self._link, len(self._sizes)
        following, stop, taken = self._next, self._stop, self._taken
        size, cost, at = self._size, self._cost, 0
        while True:
            at = bisect_left(sizes, size - capacity, at)
            if max_cost is not None:
                at = bisect_left(costs, cost - max_cost, at)
            while link[at] != at:
                link[at] = at = link[link[at]]
            if at == num_sizes:
                break
            position = following[at]
            following[at] = position + 1
            if position + 1 == stop[at]:
                link[at] = at + 1
            taken.append(position)
            size -= sizes[at]
            cost -= costs[at]
        self.size_left -= size - self._size
        self._size, self._cost = size, cost
        return cost

    def align(self, multiple: int) -> None:
        """Adds empty bins until their number is a multiple of `multiple`."""
        self._starts += [len(self._taken)] * (-len(self._starts) % multiple)

    def left(self) -> list[int]:
        """Lists the units that are in no bin, by falling size."""
        ranges = zip(self._next, self._stop, strict=True)
        positions = [position for start, stop in ranges for position in range(start, stop)]
        units: list[int] = self._order[positions].tolist()
        return units

    def bins(self) -> Bins:
        return Bins(self._order[self._taken], np.array([*self._starts, len(self._taken)]))


def first_fit_decreasing(sizes: Ints, capacity: int) -> Bins:
    """Packs units into bins of at most `capacity`; a larger unit gets a bin alone.

    sizes [5, 3, 4, 9], capacity 8  ->  [3], [0, 1], [2]
    """
    packer = Packer(sizes, costs=sizes)
    while (first := packer.take_largest()) is not None:
        packer.start_bin(first)
        packer.fill(capacity)
    return packer.bins()


_FEW_STEPS = 32
"""Most micro steps that are levelled. With more, dealing is within 1% of balance, and levelling doubles the
time of planning."""


def deal(sizes: Ints, costs: Ints, *, capacity: int, num_ranks: int) -> Bins:
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
    return Bins.from_lists(falling)


def level(lengths: Ints, costs: Ints, *, capacity: int, num_ranks: int) -> Bins:
    """Fills every rank up to the same cost, step by step, the longest sequences first.

    For more than one rank, and units of which a larger one never costs less, as sequences are. Levelling may
    fail if bins are tight, and gains nothing with many steps: then bins are dealt.
    """
    fewest = -(-int(np.minimum(lengths, capacity).sum()) // (capacity * num_ranks))
    levelled = _level(lengths, costs, capacity, num_ranks, fewest) if fewest <= _FEW_STEPS else None
    if levelled is not None:
        return levelled
    dealt = deal(lengths, costs, capacity=capacity, num_ranks=num_ranks)
    num_steps = len(dealt) // num_ranks
    if fewest < num_steps <= _FEW_STEPS:
        levelled = _level(lengths, costs, capacity, num_ranks, num_steps)
    if levelled is None:
        return dealt
    return min(levelled, dealt, key=lambda bins: bins.lock_step_cost(costs, num_ranks))


def _level(lengths: Ints, costs: Ints, capacity: int, num_ranks: int, num_steps: int) -> Bins | None:
    """Levels all steps but the last, and spreads the rest over the last; None if it does not fit there."""
    packer = Packer(lengths, costs)
    for num_left in range(num_steps, 1, -1):
        share = min(capacity, packer.size_left // (num_left * num_ranks))
        _level_step(packer, share, capacity, num_ranks)
    last = _spread(packer.left(), lengths, costs, capacity, num_ranks)
    if last is None:
        return None
    bins = packer.bins()
    return Bins.from_lists([*bins.lists(), *last]) if any(last) else bins


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
