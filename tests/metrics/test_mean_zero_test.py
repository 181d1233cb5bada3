"""The test that alarms are built on."""

import math

import numpy as np
import pytest

from pellucid.data.alarms import CHANCE
from pellucid.metrics import MeanZeroTest

SKEWED = np.array([0.999, *[0.001 / 9] * 9])
BROAD = np.exp(-np.arange(100) / 12.0) / np.exp(-np.arange(100) / 12.0).sum()


def surprise_of(
    probabilities, drawn_from, num_tokens, seed, *, bound=32.0, tolerance=0.0, lots=50
) -> MeanZeroTest:
    """Entropy + logprob of tokens that are drawn from another distribution than they say, or from it."""
    tokens = np.random.default_rng(seed).choice(len(drawn_from), num_tokens, p=drawn_from)
    entropy = -(probabilities * np.log(probabilities)).sum()
    values = np.clip(entropy + np.log(probabilities[tokens]), -bound, bound)
    test = MeanZeroTest(bound, tolerance)
    for part in np.array_split(values, lots):
        test.add(len(part), part.sum(), np.square(part).sum())
    return test


def top(probabilities, k):
    kept = np.where(np.argsort(np.argsort(-probabilities)) < k, probabilities, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize("probabilities", [SKEWED, BROAD], ids=["skewed", "broad"])
def test_fair_draws_do_not_ring_though_one_looks_all_the_time(probabilities) -> None:
    """The p-value is below 0.05 in at most 5 % of the runs: of 200, above 22 is a chance of 2e-4."""
    p_values = [surprise_of(probabilities, probabilities, 5000, seed).p_value for seed in range(200)]
    assert sum(p < 0.05 for p in p_values) <= 22
    assert min(p_values) > CHANCE


def test_rare_tokens_that_have_not_come_yet_are_not_missed() -> None:
    """A z test would say −70 here: every value seen is the entropy, and so is the spread."""
    never = top(SKEWED, 1)
    test = surprise_of(SKEWED, never, 5000, 0)
    assert test.mean == pytest.approx(-(SKEWED * np.log(SKEWED)).sum() + math.log(0.999))
    assert test.p_value > 0.01
    assert surprise_of(SKEWED, never, 200_000, 0).rings  # by now 200 of them should have come


def test_tokens_of_the_likeliest_few_ring_and_so_do_those_of_a_hotter_draw() -> None:
    cut = surprise_of(BROAD, top(BROAD, 8), 3000, 0, tolerance=0.05)
    assert cut.rings and cut.mean > 0.05
    hotter = BROAD**0.5 / (BROAD**0.5).sum()
    hot = surprise_of(BROAD, hotter, 3000, 0, tolerance=0.05)
    assert hot.rings and hot.mean < -0.05


def test_what_is_within_the_tolerance_never_rings() -> None:
    """A mean of 0.04 with a tolerance of 0.05, over a million tokens."""
    test = MeanZeroTest(1.0, 0.05)
    for _ in range(1000):
        test.add(1000, 40.0, 250.0)
    assert test.p_value == 1.0


def test_sums_that_are_not_finite_are_left_out() -> None:
    test = MeanZeroTest(1.0, 0.0)
    test.add(10, math.nan, 1.0)
    assert (test.count, test.p_value) == (0, 1.0)
