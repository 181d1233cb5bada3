"""Bins, each filled with the largest unit that fits until none does.

A unit is a sequence, or several of a group that are packed together. First-fit decreasing usually goes unit
by unit: the largest first, each into the first bin with room. This module goes bin by bin, which gives the
same bins and needs no search over bins, only one over the distinct sizes left.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
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

    def numbers(self) -> Ints:
        """Returns the index of each unit's bin."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    def plus(self, more: "Bins") -> "Bins":
        """Appends the bins of `more`."""
        return Bins(
            np.concatenate([self.units, more.units]),
            np.concatenate([self.bounds, self.bounds[-1] + more.bounds[1:]]),
        )

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
