import pytest

from pellucid.data import Example, Rollout
from pellucid.ledger import State
from pellucid.orchestrator.drought import Drought
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
