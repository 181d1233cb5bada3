"""Packing for 8 ranks under a cap of 32k tokens, against a plain first-fit-decreasing loop over the lengths.

The imbalance is that of ranks in lock step: the sum over micro steps of the dearest rank's cost ÷ that of the
mean. Its baseline takes the loop's bins as they come, one to each rank in turn.
"""

from collections.abc import Sequence
from statistics import mean

import numpy as np

from benchmarks.result import Result, fastest_each_s
from benchmarks.workload import GROUP_SIZE, Shapes, draw_shapes
from pellucid.packing import Cost, MicroStep, Sequences, plan
from pellucid.packing.plan import Ints, first_fit_decreasing

NUM_RANKS = 8
MAX_TOKENS = 32_768
COST = Cost(parity=40_000)
NUM_SEEDS = 100


def run() -> list[Result]:
    return [*_speed(), *_imbalance(), _growth()]


def make_plan(sequences: Sequences) -> list[MicroStep]:
    return plan(sequences, max_tokens=MAX_TOKENS, num_ranks=NUM_RANKS, cost=COST)


def in_groups(shapes: Shapes) -> Sequences:
    lengths = shapes.lengths
    return Sequences(lengths, np.zeros_like(lengths), np.arange(len(lengths)) // GROUP_SIZE, shapes.prompts)


def plain_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(capacity - lengths[index])
    return bins


def imbalance(steps: Sequence[Sequence[Sequence[int]]], costs: Ints) -> float:
    by_rank = [[int(costs[list(chosen)].sum()) for chosen in step] for step in steps]
    return sum(map(max, by_rank)) / sum(mean(step) for step in by_rank)


def imbalance_of_plan(lengths: Ints) -> float:
    return imbalance([step.bins for step in make_plan(Sequences.apart(lengths))], COST.of(lengths))


def imbalance_of_loop(lengths: Ints) -> float:
    bins = plain_first_fit_decreasing(lengths.tolist(), MAX_TOKENS)
    bins += [[] for _ in range(-len(bins) % NUM_RANKS)]
    steps = [bins[start : start + NUM_RANKS] for start in range(0, len(bins), NUM_RANKS)]
    return imbalance(steps, COST.of(lengths))


def _speed() -> list[Result]:
    shapes = draw_shapes(10_000)
    lengths = shapes.lengths
    as_list, apart, groups = lengths.tolist(), Sequences.apart(lengths), in_groups(shapes)
    ways = {
        "into bins": lambda: first_fit_decreasing(lengths, MAX_TOKENS),
        "for 8 ranks": lambda: make_plan(apart),
        "in groups, 8 ranks": lambda: make_plan(groups),
    }
    loop_s, *ours_s = fastest_each_s(
        [lambda: plain_first_fit_decreasing(as_list, MAX_TOKENS), *ways.values()], repeats=7
    )
    num_bins = len(first_fit_decreasing(lengths, MAX_TOKENS))
    num_plain = len(plain_first_fit_decreasing(as_list, MAX_TOKENS))
    return [
        *(
            Result(f"packing, 10,000 samples {way}", 1e4 / our_s, 1e4 / loop_s, "samples/s", "plain loop")
            for way, our_s in zip(ways, ours_s, strict=True)
        ),
        Result("packing, bins before alignment", num_bins, num_plain, "bins", "plain loop"),
    ]


def _imbalance() -> list[Result]:
    results = []
    for num_samples in (128, 256, 512):
        name = f"packing, imbalance at {num_samples}"
        seeds = [draw_shapes(seed=seed).lengths[:num_samples] for seed in range(NUM_SEEDS)]
        ours = [imbalance_of_plan(lengths) for lengths in seeds]
        plain = [imbalance_of_loop(lengths) for lengths in seeds]
        results += [
            Result(name, ours[0], plain[0], "max ÷ mean", "bins in turn"),
            Result(f"{name}, {NUM_SEEDS} seeds", mean(ours), mean(plain), "max ÷ mean", "bins in turn"),
        ]
    return results


def _growth() -> Result:
    """As many samples on both sides, so that a busy machine disturbs them alike."""
    large = Sequences.apart(draw_shapes(50_000).lengths)
    small = [Sequences.apart(draw_shapes(1_000, seed).lengths) for seed in range(50)]
    large_s, small_s = fastest_each_s(
        [lambda: make_plan(large), lambda: [make_plan(batch) for batch in small]], repeats=25
    )
    return Result("packing, 50,000 at once", large_s, small_s, "s", "50 × 1,000 samples")
