"""Droughts, and whether what is dropped is like what is kept."""

import random

import numpy as np
import pytest

from pellucid.data import Example, Rollout
from pellucid.ledger import Flow, State
from pellucid.metrics import Moments
from pellucid.orchestrator.failures import DropAudit, Drought, z_score
from pellucid.orchestrator.verdict import Verdict


def group(*outcomes: State, reward: float = 0.0, reason: str = "") -> list[Verdict]:
    return [
        Verdict(Rollout(f"g7-r{index}", "g7", Example("7", []), "env", 1.0, reward=reward), outcome, reason)
        for index, outcome in enumerate(outcomes)
    ]


def drought(*groups: list[Verdict]) -> Drought:
    found = Drought()
    for verdicts in groups:
        found.add(verdicts)
    return found


FAILED = group(State.FAILED_ROLLOUT, State.FAILED_ROLLOUT, reason="ValueError: no")
REJECTED = group(State.FAILED_ROLLOUT, State.REJECTED, State.REJECTED, reason="nan")
FLAT = group(State.FAILED_ROLLOUT, State.ZERO_ADVANTAGE, State.ZERO_ADVANTAGE, reward=0.75)

FILTERED = group(State.FAILED_ROLLOUT, State.FILTERED, reason="removed by mine:short")


def test_lost_groups_in_a_row_are_a_reason_to_stop() -> None:
    assert drought(FAILED, REJECTED).reason_to_stop(3, 100) is None
    assert drought(FAILED, FAILED, REJECTED).reason_to_stop(3, 100) == (
        "orchestrator.max_fruitless_groups = 3: as many groups in a row were lost whole; "
        "the last: rollout g7-r2 of env, rejected: nan"
    )


def test_a_flat_group_shows_that_the_environment_works() -> None:
    assert drought(FAILED, FAILED, FLAT, FAILED, FAILED).reason_to_stop(3, 100) is None


def test_a_filter_that_removes_everything_stops_a_run_as_late_and_is_named() -> None:
    filtered = drought(*[FILTERED] * 10)
    assert filtered.reason_to_stop(3, 11) is None
    assert filtered.reason_to_stop(3, 10) == (
        "orchestrator.max_signalless_groups = 10: as many groups in a row gave nothing to train on, 10 of "
        "them for filtered; the last: rollout g7-r1 of env, filtered: removed by mine:short"
    )


def test_flat_groups_stop_a_run_much_later_and_say_what_they_are() -> None:
    flat = drought(*[FLAT] * 9, FAILED)
    assert flat.reason_to_stop(3, 11) is None
    assert flat.reason_to_stop(3, 10) == (
        "orchestrator.max_signalless_groups = 10: as many groups in a row gave nothing to train on, 9 of "
        "them for zero_advantage; their mean reward is 0.750, the same for every rollout of a group: the "
        "task is solved if that is the most it can give; stop here, give the environment harder examples, or "
        "raise orchestrator.rollouts_per_example or the limit"
    )


def test_a_mixture_names_what_dominates() -> None:
    mixed = drought(*[FAILED, FAILED, FLAT] * 4)
    assert mixed.reason_to_stop(3, 12) == (
        "orchestrator.max_signalless_groups = 12: as many groups in a row gave nothing to train on, 8 of "
        "them for failed_rollout; the last: rollout g7-r1 of env, failed_rollout: ValueError: no"
    )


@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_a_task_without_any_reward_is_not_called_solved(reward: float) -> None:
    reason = drought(*[group(State.ZERO_ADVANTAGE, reward=reward)] * 9).reason_to_stop(3, 9)
    assert reason is not None and "solved" not in reason
    assert f"mean reward is {reward:.3f}, and no rollout got more than 0: the task is too hard" in reason


def test_examples_may_be_too_hard_and_solved_side_by_side() -> None:
    flat = [group(State.ZERO_ADVANTAGE, reward=reward) for reward in (1.0, 1.0, 0.0)]
    assert (
        "mean reward is 0.667: in 1 of 3 groups no rollout got more than 0, in the others all got the same"
        in (drought(*flat).reason_to_stop(3, 3) or "")
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
