"""The plan of a batch assigns its sequences to ranks and micro steps, by their lengths.

- Every sequence is in one bin; a bin holds at most `max_tokens`, or one longer sequence.
- The bins of one micro step, one per rank, hold sequences of one kind.
- A bin is empty only if all bins of its kind hold a single sequence: otherwise one of them is split.
- Members of a group stay together if that is cheaper: their common prompt is then computed once.
- There are never more micro steps than the bins of first-fit decreasing need.

First-fit decreasing usually goes unit by unit: the largest first, each into the first bin with room. `Packer`
goes bin by bin: it fills a bin with the largest unit that fits until none does. That gives the same bins
without a search over bins. A unit is a sequence, or several of a group that are packed together.

Ranks wait for each other after every micro step, so a batch costs the sum over micro steps of the costliest
rank's cost.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.data.shared_prompts import is_masked, takes_part

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cost:
    """A sequence of L tokens costs L + L² / parity.

    Cost(parity=40_000).of([10_000, 40_000])  ->  [5e8, 3.2e9], in parts of 1/40,000: 12,500 and 80,000

    Costs are integers, so that every rank makes exactly the same plan.
    """

    parity: int = 40_000
    """Tokens at which attention costs as much as everything else; it follows from the shape of the model."""

    def of(self, lengths: Ints) -> Ints:
        return lengths * (self.parity + lengths)

    def behind(self, prompts: Ints, unshared: Ints, *, masked: NDArray[np.bool_]) -> Ints:
        """Computes the cost of a member's own tokens behind a shared prompt, without that of the prompt.

        `masked` is as in `data/shared_prompts.py`. An unmasked member attends causally to prompt and own
        tokens together. That computes half of a square, so pairs under a mask count twice.
        """
        whole = prompts + unshared
        cost: Ints = unshared * self.parity + np.where(masked, 2 * unshared * whole, whole**2)
        return cost


@dataclass(frozen=True, slots=True)
class Sequences:
    """Inputs of a plan, one entry per sequence.

    lengths   [5, 7, 4, 9]
    kinds     [0, 0, 0, 1]     sequences of different kinds are never in one bin
    groups    [0, 0, 1, -1]    -1: in no group
    prompts   [3, 3, 0, 0]     tokens that the members of the group have in common at their start
    """

    lengths: Ints
    kinds: Ints
    groups: Ints
    prompts: Ints

    @classmethod
    def apart(cls, lengths: Ints) -> "Sequences":
        """Makes sequences of one kind, without groups."""
        none = np.zeros_like(lengths)
        return cls(lengths, none, none - 1, none)

    def select(self, indices: Ints) -> "Sequences":
        return Sequences(
            self.lengths[indices], self.kinds[indices], self.groups[indices], self.prompts[indices]
        )


class MicroStep(NamedTuple):
    kind: int
    bins: list[list[int]]
    """Indices of the sequences of each rank; members of a group are neighbours."""


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

    def expand(self, pieces: "Bins") -> "Bins":
        """Turns bins of pieces into bins of the units in those pieces."""
        sizes = np.diff(pieces.bounds)[self.units]
        ends = np.cumsum(sizes)
        shifts = np.repeat(pieces.bounds[self.units] - (ends - sizes), sizes)
        return Bins(pieces.units[np.arange(len(shifts)) + shifts], np.concatenate([[0], ends])[self.bounds])


def plan(
    sequences: Sequences, *, max_tokens: int, num_ranks: int, cost: Cost, in_rows: bool = False
) -> list[MicroStep]:
    """Plans the micro steps, kind by kind in order of appearance; those of a kind roughly by falling cost.

    lengths [5, 3, 4, 9] of one kind, max_tokens 8, 2 ranks  ->  [[0], [3]], [[2], [1]]
    `in_rows`: a bin takes as many tokens as its longest sequence, times the number of its sequences.
    """
    costs = cost.of(sequences.lengths)
    kinds, first_seen = np.unique(sequences.kinds, return_index=True)
    steps = []
    for kind in kinds[np.argsort(first_seen)].tolist():
        indices = np.flatnonzero(sequences.kinds == kind)
        of_kind = sequences.select(indices)
        if in_rows:
            chosen = pack_rows(of_kind.lengths, capacity=max_tokens, num_ranks=num_ranks)
        else:
            chosen = _pack_kind(of_kind, max_tokens, num_ranks, cost)
        bins = Bins(indices[chosen.units], chosen.bounds).lists()
        _split_for_empty(bins, costs, num_ranks)
        steps += [
            MicroStep(kind, bins[start : start + num_ranks]) for start in range(0, len(bins), num_ranks)
        ]
    return steps


def pack_rows(lengths: Ints, *, capacity: int, num_ranks: int) -> Bins:
    """Fills bins with rows, the longest first, so that neighbours, and the bins of a step, are alike.

    lengths [5, 3, 4, 9], capacity 10, 1 rank  ->  [3], [0, 2], [1]
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].tolist()
    starts: list[int] = []
    stop = 0
    for position, length in enumerate(falling):
        if position == stop:
            starts.append(position)
            stop = position + max(1, capacity // max(1, length))
    starts += [len(falling)] * (-len(starts) % num_ranks)
    return Bins(order, np.array([*starts, len(falling)]))


def _pack_kind(sequences: Sequences, max_tokens: int, num_ranks: int, cost: Cost) -> Bins:
    """Packs sequences of one kind, in the cheapest of several ways to keep groups together."""
    found: list[tuple[int, Bins]] = []
    for pieces in _ways(sequences, max_tokens):
        sizes, costs = pieces.sums(sequences.lengths), _costs_of(pieces, sequences, cost)
        if any(known * num_ranks <= costs.sum() for known, _ in found):
            continue  # not cheaper even if all ranks were equally busy
        arrange = level if num_ranks > 1 and len(pieces) == len(sequences.lengths) else deal
        bins = arrange(sizes, costs, capacity=max_tokens, num_ranks=num_ranks)
        found.append((bins.lock_step_cost(costs, num_ranks), bins.expand(pieces)))
    _, bins = min(found, key=lambda way: way[0])
    numbers = np.repeat(np.arange(len(bins)), np.diff(bins.bounds))
    order = np.lexsort((bins.units, sequences.groups[bins.units], numbers))
    return Bins(bins.units[order], bins.bounds)


def _ways(sequences: Sequences, max_tokens: int) -> Iterator[Bins]:
    """Yields divisions into units: groups as far as they fit, pieces of them, or each sequence alone."""
    if (sequences.prompts > 0).any():
        order = np.lexsort((-sequences.lengths, sequences.groups)).tolist()
        for limit in (max_tokens, max_tokens // 2, max_tokens // 4):
            yield _pieces(sequences, order, limit)
    num_sequences = len(sequences.lengths)
    yield Bins(np.arange(num_sequences), np.arange(num_sequences + 1))


def _costs_of(pieces: Bins, sequences: Sequences, cost: Cost) -> Ints:
    """Computes the cost of each piece; members that share a prompt compute it once per piece."""
    prompts, unshared = sequences.prompts, sequences.lengths - sequences.prompts
    shares = takes_part(prompts, unshared)
    masked = shares & is_masked(prompts, unshared)
    saved = np.where(shares, cost.of(sequences.lengths) - cost.behind(prompts, unshared, masked=masked), 0)
    first = pieces.units[pieces.bounds[:-1]]
    num_sharing, num_whole = (pieces.sums(chosen.astype(np.int64)) for chosen in (shares, shares & ~masked))
    once = np.where(num_whole > 0, prompts[first] * cost.parity, cost.of(prompts[first]))
    in_all = np.where(num_sharing > 1, pieces.sums(saved) - once, 0)
    costs: Ints = pieces.sums(cost.of(sequences.lengths)) - in_all
    return costs


def _pieces(sequences: Sequences, order: list[int], limit: int) -> Bins:
    """Cuts groups, whose members are neighbours in `order`, into pieces of at most `limit` tokens."""
    lengths, groups = sequences.lengths.tolist(), sequences.groups.tolist()
    starts: list[int] = []
    last, room = -1, 0
    for position, index in enumerate(order):
        if groups[index] != last or last == -1 or lengths[index] > room:
            starts.append(position)
            last, room = groups[index], limit
        room -= lengths[index]
    return Bins(np.array(order), np.array([*starts, len(order)]))


def _split_for_empty(bins: list[list[int]], costs: Ints, num_ranks: int) -> None:
    """Gives each empty bin half of the costliest bin that can be split, of its own micro step if possible."""
    for empty in [index for index, chosen in enumerate(bins) if not chosen]:
        start = empty - empty % num_ranks
        for places in (range(start, start + num_ranks), range(len(bins))):
            if donors := [index for index in places if len(bins[index]) > 1]:
                donor = bins[max(donors, key=lambda index: int(costs[bins[index]].sum()))]
                up_to = np.cumsum(costs[donor])
                half = 1 + int(np.searchsorted(up_to[:-2], up_to[-1] // 2))
                bins[empty], donor[half:] = donor[half:], []
                break


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

    def _with_units(self, at: int) -> int:
        """Finds the first size from index `at` on of which units are left."""
        link = self._link
        while link[at] != at:
            link[at] = at = link[link[at]]
        return at

    def _take(self, at: int) -> int:
        """Takes the next unit of a size, and returns its position."""
        position = self._next[at]
        self._next[at] = position + 1
        if position + 1 == self._stop[at]:
            self._link[at] = at + 1
        return position

    def take_largest(self) -> Unit | None:
        """Takes the largest unit left, to start a bin with, whatever its size; None if no unit is left."""
        at = self._with_units(0)
        if at == len(self._sizes):
            return None
        self.size_left += self._sizes[at]
        return Unit(self._take(at), -self._sizes[at], -self._costs[at])

    def start_bin(self, first: Unit) -> None:
        self._starts.append(len(self._taken))
        self._taken.append(first.position)
        self._size, self._cost = first.size, first.cost

    def fill(self, capacity: int, max_cost: int | None = None) -> int:
        """Adds the largest unit within both limits to the last bin until none fits; returns its cost."""
        size, cost, at = self._size, self._cost, 0
        while True:
            at = bisect_left(self._sizes, size - capacity, at)
            if max_cost is not None:
                at = bisect_left(self._costs, cost - max_cost, at)
            at = self._with_units(at)
            if at == len(self._sizes):
                break
            self._taken.append(self._take(at))
            size -= self._sizes[at]
            cost -= self._costs[at]
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
        return self._order[positions].tolist()  # type: ignore[no-any-return]

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
