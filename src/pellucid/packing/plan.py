"""The plan of a batch assigns its sequences to ranks and micro steps, by their lengths.

- Every sequence is in one bin; a bin holds at most `max_tokens`, or one longer sequence.
- The bins of one micro step, one per rank, hold sequences of one kind.
- A bin is empty only if all bins of its kind hold a single sequence: otherwise one of them is split.
- Members of a group stay together if that is cheaper: their common prompt is then computed once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.data.shared_prompts import is_masked, takes_part
from pellucid.packing.bins import Bins, Ints, deal, level


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

    def behind(self, prompts: Ints, own: Ints, *, masked: NDArray[np.bool_]) -> Ints:
        """Computes the cost of a member's own tokens behind a shared prompt, without that of the prompt.

        `masked` is as in `data/shared_prompts.py`. An unmasked member attends causally to prompt and own
        tokens together. That computes half of a square, so pairs under a mask count twice.
        """
        whole = prompts + own
        cost: Ints = own * self.parity + np.where(masked, 2 * own * whole, whole**2)
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


def plan(sequences: Sequences, *, max_tokens: int, num_ranks: int, cost: Cost) -> list[MicroStep]:
    """Plans the micro steps, kind by kind in order of appearance; those of a kind roughly by falling cost.

    lengths [5, 3, 4, 9] of one kind, max_tokens 8, 2 ranks  ->  [[0], [3]], [[2], [1]]
    """
    costs = cost.of(sequences.lengths)
    kinds, first_seen = np.unique(sequences.kinds, return_index=True)
    steps = []
    for kind in kinds[np.argsort(first_seen)].tolist():
        own = np.flatnonzero(sequences.kinds == kind)
        chosen = _pack_kind(sequences.select(own), max_tokens, num_ranks, cost)
        bins = Bins(own[chosen.units], chosen.bounds).lists()
        _split_for_empty(bins, costs, num_ranks)
        steps += [
            MicroStep(kind, bins[start : start + num_ranks]) for start in range(0, len(bins), num_ranks)
        ]
    return steps


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
    groups = sequences.groups[bins.units]
    return Bins(bins.units[np.lexsort((bins.units, groups, bins.numbers()))], bins.bounds)


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
    prompts, own = sequences.prompts, sequences.lengths - sequences.prompts
    shares = takes_part(prompts, own)
    masked = shares & is_masked(prompts, own)
    saved = np.where(shares, cost.of(sequences.lengths) - cost.behind(prompts, own, masked=masked), 0)
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
