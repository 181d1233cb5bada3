import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.metrics import JsonlSink, Max, Mean, MetricSet, Moments, Sum, read_metrics
from tolerance import near

FLOATS = st.floats(-1e3, 1e3, width=32)


def moments(values) -> Moments:
    return Moments.of(len(values), sum(values), sum(v * v for v in values), max(values, default=-math.inf))


@given(st.lists(st.lists(FLOATS, max_size=8), min_size=1, max_size=6))
def test_combined_moments_are_those_of_all_values(parts) -> None:
    total = moments(parts[0])
    for part in parts[1:]:
        total = total + moments(part)
    values = [value for part in parts for value in part]
    report = total.report()
    if not values:
        assert report == {}
        return
    mean, squares = np.mean(values), np.mean(np.square(values))
    assert report["/mean"] == near(mean, terms=len(values), scale=np.abs(values).max(), dtype=np.float64)
    # A variance is the difference of two squares as large as these.
    variance = near(np.var(values), terms=len(values), scale=2 * squares, dtype=np.float64)
    assert report["/std"] ** 2 == variance
    assert report["/max"] == max(values)


def test_a_mean_is_weighted_and_absent_without_weight() -> None:
    metrics = MetricSet()
    metrics.add("a", Mean(6.0, 4))
    metrics.add("a", Mean(1.0, 1))
    metrics.add("b", Mean(0.0, 0))
    metrics.add("c", Sum(2.0))
    metrics.add("c", Sum(3.0))
    metrics.add("d", Max(2.0))
    metrics.add("d", Max(1.0))
    assert metrics.report() == {"a": 1.4, "c": 5.0, "d": 2.0}


def test_the_metrics_of_ranks_combine_by_what_they_are() -> None:
    """Four tokens on one rank, one on the other: the mean is over five, not of two means."""
    ranks = [MetricSet(), MetricSet()]
    for rank, mean, total, highest in zip(
        ranks, (Mean(6.0, 4), Mean(1.0, 1)), (2.0, 3.0), (9.0, 7.0), strict=True
    ):
        rank.add("kl", mean)
        rank.add("tokens", Sum(total))
        rank.add("fullest", Max(highest))
    ranks[1].add("only_here", Sum(1.0))
    assert MetricSet.combined(ranks).report() == {"kl": 1.4, "tokens": 5.0, "fullest": 9.0, "only_here": 1.0}
    assert ranks[0].report() == {"kl": 1.5, "tokens": 2.0, "fullest": 9.0}


def test_one_name_has_one_reduction() -> None:
    metrics = MetricSet()
    metrics.add("a", Sum(1.0))
    with pytest.raises(TypeError, match="metric a is a Sum, not a Max"):
        metrics.add("a", Max(1.0))


def test_jsonl_round_trip(tmp_path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(0, {"loss": 0.5})
    sink.log(1, {"loss": math.nan})
    sink.close()
    with (tmp_path / "m.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    records = list(read_metrics(tmp_path / "m.jsonl"))
    assert [(record["step"], record["loss"]) for record in records] == [(0, 0.5), (1, None)]
