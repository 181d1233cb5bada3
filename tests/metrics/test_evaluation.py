"""avg@k and pass@k by hand, by enumeration, and as a line to read."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.metrics.evaluation import (
    average_in,
    evaluation_line,
    evaluations_in,
    measure,
    metric_name,
    pass_at,
)


def test_the_example_of_the_module():
    assert measure([[1.0, 0.5, 1.0, None], [0.0, 0.0, 0.0, 0.0]], pass_reward=1.0) == {
        "avg@4": pytest.approx(2.5 / 7),
        "pass@1": 0.25,
        "pass@2": pytest.approx(5 / 12),
        "pass@4": 0.5,
        "num_failed": 1,
    }


def test_a_greedy_evaluation_has_one_attempt():
    assert measure([[0.25], [1.0], [0.75], [1.0]], pass_reward=0.75) == {
        "avg@1": 0.75,
        "pass@1": 0.75,
        "num_failed": 0,
    }


def test_only_powers_of_two_up_to_the_number_of_attempts():
    assert [key for key in measure([[0.0] * 6], 1.0) if key.startswith("pass")] == [
        "pass@1",
        "pass@2",
        "pass@4",
    ]
    assert [key for key in measure([[0.0] * 8], 1.0) if key.startswith("pass")][-1] == "pass@8"


def test_if_every_attempt_failed_there_is_no_average_and_nothing_passed():
    assert measure([[None, None]], pass_reward=-1.0) == {"pass@1": 0.0, "pass@2": 0.0, "num_failed": 2}


@pytest.mark.parametrize(
    ("drawn", "passed", "attempts", "chance"),
    [(1, 3, 8, 3 / 8), (2, 3, 8, 1 - 10 / 28), (4, 3, 8, 1 - 5 / 70), (8, 1, 8, 1.0), (8, 0, 8, 0.0)],
)
def test_pass_at(drawn, passed, attempts, chance):
    assert pass_at(drawn, num_passed=passed, num_attempts=attempts) == pytest.approx(chance)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(1, n), st.integers(0, n), st.just(n))))
def test_pass_at_is_the_share_of_draws_that_include_a_pass(case):
    drawn, passed, attempts = case
    draws = list(combinations([True] * passed + [False] * (attempts - passed), drawn))

    assert pass_at(drawn, num_passed=passed, num_attempts=attempts) == pytest.approx(
        sum(map(any, draws)) / len(draws)
    )


def test_a_record_by_environment():
    record = {"step": 50, "time": 1.0, metric_name("a/b", "avg@8"): 0.5, metric_name("c", "time_s"): 2.0}

    assert evaluations_in(record) == {"a/b": {"avg@8": 0.5}, "c": {"time_s": 2.0}}
    assert average_in({"pass@1": 0.25, "avg@8": 0.5}) == ("avg@8", 0.5)
    assert average_in({"pass@1": 0.25}) is None


def test_the_line_of_an_evaluation():
    measures = {
        **{"avg@8": 0.8125, "pass@1": 0.5, "pass@2": 0.625, "pass@4": 0.7, "pass@8": 0.75},
        **{"num_failed": 1, "completion_length": 12.34, "time_s": 3.21},
    }
    assert evaluation_line(50, "reverse-text", measures) == (
        "eval   50  reverse-text  avg@8 0.812  pass@1 0.500  pass@8 0.750  12.3 tokens  3.2 s  1 failed"
    )
    greedy = {"avg@1": 0.8, "pass@1": 0.5, "num_failed": 0, "completion_length": 9.0, "time_s": 0.96}
    assert evaluation_line(0, "x", greedy) == "eval    0  x  avg@1 0.800  pass@1 0.500  9.0 tokens  1.0 s"
    assert evaluation_line(0, "x", {"pass@1": 0.0, "num_failed": 64, "time_s": 0.1}) == (
        "eval    0  x  no reward  pass@1 0.000  0.1 s  64 failed"
    )


def test_a_long_name_makes_room():
    measures = {"avg@1": 0.5, "pass@1": 0.5, "num_failed": 0, "completion_length": 9.0, "time_s": 1.0}
    line = evaluation_line(9999, "package.module:" + "A" * 100, measures)

    assert len(line) == 100
    assert line.startswith("eval 9999  package.module:AAA") and "A…  avg@1 0.500" in line
