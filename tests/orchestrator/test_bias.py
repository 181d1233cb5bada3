import random

import numpy as np
import pytest

from pellucid.ledger import Flow, State
from pellucid.metrics import Moments
from pellucid.orchestrator.bias import DropAudit, z_score


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
        biased.add(outcome, "env", length, reward)
        outcome = State.STALE if generator.random() < 0.1 else Flow.SENT
        fair.add(outcome, "env", length, reward)
    (finding,) = biased.findings()
    (difference,) = finding.differences
    assert (finding.state, difference.what) == (State.STALE, "length")
    assert difference.dropped > 90 > 60 > difference.kept
    assert "of 400 rollouts) differs from what is kept: length 9" in str(finding)
    assert "set orchestrator.pace_sampling" in str(finding)
    assert fair.findings() == []


def test_an_environment_that_is_dropped_more_often_is_named() -> None:
    audit = DropAudit()
    for index in range(200):
        slow = index % 4 == 0
        stale = slow and index % 8 == 0
        audit.add(State.STALE if stale else Flow.SENT, "slow" if slow else "quick", 10, 0.5)
    (finding,) = audit.findings()
    assert {each.what for each in finding.differences} == {"share of quick", "share of slow"}


def test_a_handful_says_nothing() -> None:
    audit = DropAudit()
    for _ in range(19):
        audit.add(State.STALE, "env", 100, 0.0)
    for index in range(100):
        audit.add(Flow.SENT, "env", index % 3, 1.0)
    assert audit.findings() == []
    audit.add(State.STALE, "env", 101, 0.0)
    assert [finding.state for finding in audit.findings()] == [State.STALE]


def test_each_reason_is_compared_on_its_own_and_what_a_filter_refuses_is_meant_to_differ() -> None:
    audit = DropAudit()
    for index in range(100):
        audit.add(Flow.SENT, "env", 10 + index % 5, index % 2)
        audit.add(State.FAILED_ROLLOUT, "env", 40 + index % 5, None)
        audit.add(State.FILTERED, "env", 90 + index % 5, 0.0)
        audit.add(State.REJECTED, "env", 10 + index % 5, index % 2)
    (finding,) = audit.findings()
    assert (finding.state, finding.num_dropped, finding.num_kept) == (State.FAILED_ROLLOUT, 100, 100)
    assert [difference.what for difference in finding.differences] == ["length"]


def test_stale_rollouts_that_were_cut_short_are_not_called_short() -> None:
    """Their lengths are lower bounds: only longer ones tell something."""
    for num_tokens, is_found in ((2, False), (90, True)):
        audit = DropAudit()
        for number in range(60):
            audit.add(Flow.SENT, "env", 30 + number % 3, 0.5)
            audit.add(State.STALE, "env", num_tokens + number % 3, None)
        assert [finding.state for finding in audit.findings()] == [State.STALE] * is_found
