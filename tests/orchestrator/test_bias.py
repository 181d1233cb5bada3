import random

import numpy as np
import pytest

from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.ledger import Flow, State
from pellucid.metrics import Moments
from pellucid.orchestrator.bias import DropAudit, z_score
from pellucid.orchestrator.verdict import Verdict


def verdict(outcome, length: int, reward: float, env: str = "env") -> Verdict:
    completion = Completion([1] * length, [-1.0] * length, [(0, length)], "stop")
    return Verdict(
        Rollout("r", "g", Example("0", []), env, 1.0, [Turn([5], completion, "")], reward), outcome
    )


def test_z_is_welchs() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1, 2, 50), generator.normal(0, 1, 80)
    moments = [Moments.of(len(x), x.sum(), (x * x).sum(), x.max()) for x in (a, b)]
    expected = (a.mean() - b.mean()) / np.sqrt(a.var() / 50 + b.var() / 80)
    assert z_score(*moments) == pytest.approx(expected)


def test_dropping_the_long_ones_is_noticed_and_dropping_at_random_is_not() -> None:
    generator = random.Random(1)
    biased, fair = DropAudit(), DropAudit()
    for _ in range(400):
        length = generator.randint(1, 100)
        reward = generator.random()
        late = length > 90
        outcome = State.STALE if late else generator.choice([Flow.SENT, State.ZERO_ADVANTAGE])
        biased.add([verdict(outcome, length, reward)])
        outcome = State.STALE if generator.random() < 0.1 else Flow.SENT
        fair.add([verdict(outcome, length, reward)])
    assert [each.what for each in biased.differences()] == ["length"]
    assert biased.differences()[0].stale > 90 > 60 > biased.differences()[0].kept
    assert "of 400 rollouts) differs from what is kept: length 9" in biased.line()
    assert fair.differences() == [] and fair.line() == ""


def test_an_environment_that_is_dropped_more_often_is_named() -> None:
    audit = DropAudit()
    for index in range(200):
        slow = index % 4 == 0
        stale = slow and index % 8 == 0
        audit.add([verdict(State.STALE if stale else Flow.SENT, 10, 0.5, "slow" if slow else "quick")])
    assert {each.what for each in audit.differences()} == {"share of quick", "share of slow"}


def test_a_handful_says_nothing_and_failures_are_on_neither_side() -> None:
    audit = DropAudit()
    for _ in range(19):
        audit.add([verdict(State.STALE, 100, 0.0), verdict(State.FAILED_ROLLOUT, 3, 0.0)])
    for index in range(100):
        audit.add([verdict(Flow.SENT, index % 3, 1.0)])
    assert audit.differences() == []
    audit.add([verdict(State.STALE, 99, 0.1)])
    assert {each.what for each in audit.differences()} == {"length", "reward"}
