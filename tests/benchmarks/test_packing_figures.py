"""The figures of `python -m benchmarks packing` that do not depend on the machine."""

import numpy as np
import pytest

from benchmarks.packing import (
    COST,
    MAX_TOKENS,
    NUM_RANKS,
    imbalance,
    imbalance_of_loop,
    imbalance_of_plan,
    in_groups,
    make_plan,
    plain_first_fit_decreasing,
)
from benchmarks.workload import GROUP_SIZE, MAX_LENGTH, draw_samples, draw_shapes
from pellucid.packing import Sequences
from pellucid.packing.plan import first_fit_decreasing


@pytest.mark.parametrize(("num_samples", "bound"), [(128, 1.15), (256, 1.08), (512, 1.03)])
def test_ranks_are_equally_busy(num_samples, bound) -> None:
    """The benchmark's workload, and all but one of 20 more: a single sample may be too long to be matched."""
    seeds = [draw_shapes(seed=seed).lengths[:num_samples] for seed in range(21)]
    ours = [imbalance_of_plan(lengths) for lengths in seeds]
    assert ours[0] <= bound
    assert sorted(ours)[-2] <= bound
    assert np.mean(ours) < np.mean([imbalance_of_loop(lengths) for lengths in seeds])


def test_imbalance_by_hand() -> None:
    """Two steps of two ranks: (4 + 3) ÷ (3 + 2)."""
    assert imbalance([[[0], [1]], [[2], [3]]], np.array([4, 2, 3, 1])) == 7 / 5


def test_bins_are_those_of_the_plain_loop() -> None:
    lengths = draw_shapes(2_000).lengths
    expected = plain_first_fit_decreasing(lengths.tolist(), MAX_TOKENS)
    assert first_fit_decreasing(lengths, MAX_TOKENS).lists() == expected
    steps = make_plan(Sequences.apart(lengths))
    assert len(steps) <= -(-len(expected) // NUM_RANKS)


def test_sharing_prompts_makes_a_plan_cheaper() -> None:
    """Cost with every prompt computed once per bin, against a plan that knows nothing of groups."""
    batch = in_groups(draw_shapes())

    def lock_step_cost(steps) -> int:
        return sum(max(cost_of(chosen) for chosen in step.bins) for step in steps)

    def cost_of(chosen) -> int:
        _, first, sizes = np.unique(batch.groups[chosen], return_index=True, return_counts=True)
        prompts = batch.prompts[chosen][first]
        return int(COST.of(batch.lengths[chosen]).sum() - (COST.of(prompts) * (sizes - 1)).sum())

    assert lock_step_cost(make_plan(batch)) < 0.95 * lock_step_cost(make_plan(Sequences.apart(batch.lengths)))


def test_the_workload_is_what_it_says() -> None:
    shapes = draw_shapes(8_000, seed=1)
    assert np.median(shapes.prompts[::GROUP_SIZE]) == pytest.approx(600, rel=0.1)
    assert np.median(shapes.completions) == pytest.approx(2500, rel=0.05)
    assert shapes.lengths.max() == MAX_LENGTH
    assert (shapes.prompts.reshape(-1, GROUP_SIZE) == shapes.prompts[::GROUP_SIZE, None]).all()

    samples = draw_samples(64)
    assert [sample.length for sample in samples] == draw_shapes(64).lengths.tolist()
    assert len({sample.values["env_name"] for sample in samples}) == 4
    first = [sample.arrays["token_ids"].array()[: draw_shapes(64).prompts[0]] for sample in samples[:8]]
    assert all((prompt == first[0]).all() for prompt in first)
    masked = [sample.num_trainable < sample.num_sampled for sample in samples]
    assert 0.2 < np.mean(masked) < 0.6
    logprobs = np.concatenate([sample.arrays["inference_logprobs"].array() for sample in samples])
    assert logprobs.mean() == pytest.approx(-0.4, rel=0.02)
    again = draw_samples(64)
    assert [sample.arrays for sample in again] == [sample.arrays for sample in samples]
