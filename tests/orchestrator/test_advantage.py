import pytest

from pellucid.config import CustomAdvantageConfig, DefaultAdvantageConfig
from pellucid.config.orchestrator import LengthPenaltyConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.errors import ConfigError
from pellucid.orchestrator.advantage import (
    AdvantageInputs,
    AdvantageOutputs,
    ScoredRollout,
    default_advantage,
    load_advantage,
)

PENALTIES = {
    "none": LengthPenaltyConfig(),
    "turns": LengthPenaltyConfig(type="turns"),
    "tokens w1/0": LengthPenaltyConfig(type="tokens", completion_weight=1, tool_response_weight=0),
    "tokens w0/1": LengthPenaltyConfig(type="tokens", completion_weight=0, tool_response_weight=1),
    "tokens w1/1": LengthPenaltyConfig(type="tokens", completion_weight=1, tool_response_weight=1),
}


def scored(reward: float, tokens: list[int] | None = None, tool_tokens: int = 0) -> ScoredRollout:
    return ScoredRollout(reward, tokens or [4], tool_tokens, "env", "0", "g0")


def rollout(reward: float, turns: tuple[int, ...] = (3,)) -> Rollout:
    spans = [("user", 0, 2), ("assistant", 2, 5), ("tool", 5, 12), ("assistant", 12, 15)]
    completions = [Completion([7] * count, [-0.5] * count, [(0, count)], "stop") for count in turns]
    return Rollout(
        "g0-r0", "g0", Example("0", []), "env", 1.0, [Turn([5, 6], c, "", spans) for c in completions], reward
    )


@pytest.mark.golden("advantage_group")
def test_golden(case: dict) -> None:
    inputs = AdvantageInputs([ScoredRollout(group_id="g", **item) for item in case["rollouts"]])
    advantages = default_advantage(inputs, PENALTIES[case["length_penalty"]]).advantages
    assert advantages == pytest.approx(case["advantages"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 123.456])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    inputs = AdvantageInputs([scored(reward)] * size)
    assert default_advantage(inputs, LengthPenaltyConfig()).advantages == [0.0] * size


def test_what_an_advantage_sees_of_a_rollout() -> None:
    seen = ScoredRollout.of(rollout(0.5, (3, 2)))
    assert seen == ScoredRollout(0.5, [3, 2], 7, "env", "0", "g0")


def test_default_from_config() -> None:
    advantage = load_advantage(DefaultAdvantageConfig(length_penalty=LengthPenaltyConfig(type="turns")))
    assert advantage([rollout(1.0, (3,)), rollout(1.0, (3, 2, 1))]) == [0.25, -0.25]


def ranked(inputs: AdvantageInputs, scale: float) -> AdvantageOutputs:
    return AdvantageOutputs([scale * index for index in range(len(inputs.rollouts))])


def too_few(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([1.0])


def not_finite(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([float("nan")] * len(inputs.rollouts))


def raising(inputs: AdvantageInputs) -> AdvantageOutputs:
    raise ZeroDivisionError("no spread")


def nothing(inputs: AdvantageInputs) -> None:
    return None


def custom(name: str, **kwargs: float) -> CustomAdvantageConfig:
    return CustomAdvantageConfig(type="custom", import_path=f"{__name__}:{name}", kwargs=kwargs)


def test_custom_function() -> None:
    assert load_advantage(custom("ranked", scale=0.5))([rollout(0.0), rollout(0.0)]) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("too_few", "1 advantages for 2 rollouts"),
        ("not_finite", "advantage nan for rollout 'g0-r0'"),
        ("raising", r"ZeroDivisionError: no spread \(line \d+ of .*test_advantage\.py\)"),
        ("nothing", "AttributeError: 'NoneType' object has no attribute 'advantages'"),
    ],
)
def test_wrong_answers_name_the_function_and_the_group(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}', group 'g0': {complaint}"):
        load_advantage(custom(name))([rollout(0.0), rollout(1.0)])


def test_missing_function_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator\.advantage\.import_path = 'nowhere:f'"):
        load_advantage(CustomAdvantageConfig(type="custom", import_path="nowhere:f"))
