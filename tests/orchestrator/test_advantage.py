import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.advantage import make_rollouts, per_group
from pellucid.config import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DefaultAdvantageConfig,
    GroupAdvantageConfig,
)
from pellucid.config.orchestrator import LengthPenaltyConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.errors import ConfigError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.advantage import (
    AdvantageInputs,
    AdvantageOutputs,
    Groups,
    ScoredRollout,
    load_advantage,
)
from pellucid.orchestrator.verdict import Judge
from tolerance import near

PENALTIES = {
    "none": LengthPenaltyConfig(),
    "turns": LengthPenaltyConfig(type="turns"),
    "tokens w1/0": LengthPenaltyConfig(type="tokens", completion_weight=1, tool_response_weight=0),
    "tokens w0/1": LengthPenaltyConfig(type="tokens", completion_weight=0, tool_response_weight=1),
    "tokens w1/1": LengthPenaltyConfig(type="tokens", completion_weight=1, tool_response_weight=1),
}
BUILT_IN: list[AdvantageConfig] = [
    *(DefaultAdvantageConfig(length_penalty=penalty) for penalty in PENALTIES.values()),
    *(GroupAdvantageConfig(type=kind) for kind in ("rloo", "grpo_std", "max_rl", "none")),
]

rewards_of_a_group = st.lists(
    st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(-4, 4, width=32)), min_size=1, max_size=9
)


def name_of(config: AdvantageConfig) -> str:
    penalty = getattr(config, "length_penalty", LengthPenaltyConfig())
    return f"{config.type}-{penalty.type}"


def scored(
    reward: float, tokens: list[int] | None = None, tool_tokens: int = 0, group_id: str | None = "g0"
) -> ScoredRollout:
    return ScoredRollout(reward, tokens or [4], tool_tokens, "env", "0", group_id)


def rollout(reward: float, turns: tuple[int, ...] = (3,)) -> Rollout:
    spans = [("user", 0, 2), ("assistant", 2, 5), ("tool", 5, 12), ("assistant", 12, 15)]
    completions = [Completion([7] * count, [-0.5] * count, [(0, count)], "stop") for count in turns]
    return Rollout(
        "g0-r0", "g0", Example("0", []), "env", 1.0, [Turn([5, 6], c, "", spans) for c in completions], reward
    )


def advantages_of(config: AdvantageConfig, rewards: list[float]) -> list[float]:
    inputs = AdvantageInputs([scored(reward) for reward in rewards])
    return load_advantage(config).function(inputs).advantages


def of_kind(kind: str, rewards: list[float]) -> list[float]:
    config = (
        DefaultAdvantageConfig() if kind == "default" else GroupAdvantageConfig.model_validate({"type": kind})
    )
    return advantages_of(config, rewards)


@pytest.mark.golden("advantage_group")
def test_golden_group(case: dict) -> None:
    inputs = AdvantageInputs([ScoredRollout(group_id="g", **item) for item in case["rollouts"]])
    advantage = load_advantage(DefaultAdvantageConfig(length_penalty=PENALTIES[case["length_penalty"]]))
    assert advantage.function(inputs).advantages == near(case["advantages"], terms=32)


@pytest.mark.golden("advantage_compute")
def test_golden_interleaved_partial_groups(case: dict) -> None:
    rollouts = [ScoredRollout(**item) for item in case["rollouts"]]
    advantage = load_advantage(DefaultAdvantageConfig(length_penalty=PENALTIES[case["name"]]))
    assert advantage.compute(rollouts) == near(case["advantages"], terms=32)


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("default", [1, 0, 1, 1], [0.25, -0.75, 0.25, 0.25]),
        ("rloo", [1, 0, 1, 1], [1 / 3, -1, 1 / 3, 1 / 3]),
        ("rloo", [5, 1], [4, -4]),
        ("grpo_std", [1, 0, 1, 1], [0.5, -1.5, 0.5, 0.5]),  # the std is sqrt(0.75 / 3) = 0.5
        ("grpo_std", [3, 1], [2**-0.5, -(2**-0.5)]),
        ("max_rl", [1, 0, 1, 1], [1 / 3, -1, 1 / 3, 1 / 3]),
        ("max_rl", [0, 0, 0, 1], [-1, -1, -1, 3]),
        ("max_rl", [1, -3], [0, 0]),  # the mean is not above 0
        ("none", [1, 0, 0.5], [1, 0, 0.5]),
        ("default", [7], [0]),
        ("rloo", [7], [0]),
        ("grpo_std", [7], [0]),
        ("max_rl", [7], [0]),
    ],
)
def test_by_hand(kind: str, rewards: list[float], expected: list[float]) -> None:
    assert of_kind(kind, rewards) == near(expected, terms=len(rewards) + 4)


@pytest.mark.parametrize("kind", ["default", "rloo", "grpo_std", "max_rl"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 123.456])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(kind: str, reward: float, size: int) -> None:
    assert of_kind(kind, [reward] * size) == [0.0] * size


@given(rewards_of_a_group)
@example([0.0, 1.401298464324817e-45])  # the smallest float32: half of it is rounded up or down
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for kind in ("default", "rloo", "grpo_std", "max_rl"):
        advantages = of_kind(kind, rewards)
        # They are differences from a mean, known to eps of the rewards (or of the smallest normal number),
        # however small and scaled they are.
        apart = max(abs(reward - sum(rewards) / len(rewards)) for reward in rewards) or 1.0
        known_to = max(map(abs, rewards)) + float(np.finfo(np.float32).smallest_normal)
        scale = max(map(abs, advantages)) * max(1.0, known_to / apart)
        assert sum(advantages) == near(0.0, terms=len(rewards) + 4, scale=len(rewards) * scale)


@given(rewards_of_a_group, st.sampled_from([0.25, 2.0, 8.0]), st.integers(-3, 3))
def test_grpo_std_does_not_see_scale_and_shift(rewards: list[float], scale: float, shift: int) -> None:
    few_bits = [round(reward * 64) / 64 for reward in rewards]  # scaled and shifted without rounding
    moved = [scale * reward + shift for reward in few_bits]
    expected = of_kind("grpo_std", few_bits)
    # A difference from the mean is known to eps of the rewards, which may be much larger than it.
    apart = max(abs(reward - sum(few_bits) / len(few_bits)) for reward in few_bits) or 1.0
    size = max(max(map(abs, few_bits)), max(map(abs, moved)) / scale)
    blown_up = max(1.0, size / apart)
    assert of_kind("grpo_std", moved) == near(
        expected, terms=len(rewards) + 4, scale=max(map(abs, expected)) * blown_up
    )


@pytest.mark.parametrize("config", BUILT_IN, ids=name_of)
@given(groups=st.lists(rewards_of_a_group, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_many_groups_at_once_are_the_groups_one_by_one(
    config: AdvantageConfig, groups: list[list[float]], seed: int
) -> None:
    """Mixed as they may come; whether they are told apart by group or by example."""
    generator = random.Random(seed)
    rollouts = [
        ScoredRollout(
            reward,
            [generator.randrange(20) for _ in range(generator.randint(1, 3))],
            generator.randrange(5),
            "env",
            str(number),
            f"g{number}" if seed % 2 else None,
        )
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]
    generator.shuffle(rollouts)
    advantage = load_advantage(config)
    together = advantage.compute(rollouts)
    for number in range(len(groups)):
        places = [index for index, each in enumerate(rollouts) if each.example_id == str(number)]
        alone = advantage.function(AdvantageInputs([rollouts[index] for index in places])).advantages
        assert [together[index] for index in places] == alone


def test_the_benchmark_compares_equals() -> None:
    rollouts = make_rollouts(80, 8)
    ours = load_advantage(DefaultAdvantageConfig()).compute(rollouts)
    assert ours == near(per_group(rollouts), terms=8, scale=max(abs(rollout.reward) for rollout in rollouts))
    assert len(ours) == 80 and len({rollout.group_id for rollout in rollouts}) == 10


def test_the_statistics_of_groups() -> None:
    groups = Groups([0, 1, 0, 2])
    values = np.array([1.0, 5.0, 2.0, -3.0], np.float32)
    assert groups.sizes.tolist() == [2, 1, 2, 1]
    assert groups.mean(values).tolist() == [1.5, 5.0, 1.5, -3.0]
    assert groups.max(values).tolist() == [2.0, 5.0, 2.0, -3.0]


def test_what_an_advantage_sees_of_a_rollout() -> None:
    whole = rollout(0.5, (3, 2))
    assert ScoredRollout.of(whole) == ScoredRollout(0.5, [3, 2], 7, "env", "0", "g0", whole)


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


def centred(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = [each.reward for each in inputs.rollouts]
    return AdvantageOutputs([reward - sum(rewards) / len(rewards) for reward in rewards])


def standardised(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Divides by a standard deviation that is a rounding error where rewards are equal."""
    distances = centred(inputs).advantages
    std = (sum(each * each for each in distances) / len(distances)) ** 0.5
    return AdvantageOutputs([each / std if std else 0.0 for each in distances])


def brief(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Shapes rewards by what only the whole rollout tells: its texts."""
    shaped = [each.reward - len(each.rollout.turns[-1].text) / 10 for each in inputs.rollouts]
    mean = sum(shaped) / len(shaped)
    return AdvantageOutputs([reward - mean for reward in shaped], rewards=shaped)


def one_shaped(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([0.0] * len(inputs.rollouts), rewards=[1.0])


def says(text: str, reward: float) -> Rollout:
    turn = Turn([5, 6], Completion([7], [-0.5], [(0, 1)], "stop"), text)
    return Rollout("g0-r0", "g0", Example("0", []), "env", 1.0, [turn], reward)


def test_custom_function() -> None:
    assert load_advantage(custom("ranked", scale=0.5))([rollout(0.0), rollout(1.0)]) == [0.0, 0.5]


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("name", ["centred", "standardised"])
def test_rounding_errors_of_equal_rewards_are_no_signal(name: str, rewards: list[float]) -> None:
    noise = advantages_of(custom(name), rewards)
    assert any(noise), "the function itself has a rounding error"
    advantage = load_advantage(custom(name))
    assert advantage([rollout(reward) for reward in rewards]) == [0.0] * 3
    assert advantage.compute([scored(reward) for reward in rewards]) == [0.0] * 3


def test_shaped_rewards_decide_about_the_signal_of_a_custom_function() -> None:
    advantage = load_advantage(custom("brief"))
    assert advantage([says("ab", 1.0), says("abcd", 1.0)]) == pytest.approx([0.1, -0.1])
    assert advantage([says("ab", 0.3), says("abcd", 0.5)]) == [0.0, 0.0]


def test_a_group_of_one_has_what_its_function_says() -> None:
    assert load_advantage(custom("constant"))([rollout(1.0)]) == [0.5]


def constant(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([0.5] * len(inputs.rollouts))


def test_a_custom_function_is_called_once_per_group() -> None:
    mixed = [scored(index, group_id=group) for index, group in enumerate(("a", "b", "b", "a", "b"))]
    assert load_advantage(custom("ranked", scale=1)).compute(mixed) == [0, 0, 1, 1, 2]
    assert load_advantage(custom("ranked", scale=1)).compute([]) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("too_few", "1 advantages for 2 rollouts"),
        ("not_finite", "advantage nan for a rollout with reward 0.0"),
        ("raising", r"ZeroDivisionError: no spread \(.*test_advantage\.py:\d+\)"),
        ("one_shaped", "1 shaped rewards for 2 rollouts"),
        ("nothing", "TypeError: returned a NoneType; return AdvantageOutputs"),
    ],
)
def test_wrong_answers_name_the_function_and_the_group(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}', group 'g0': {complaint}"):
        load_advantage(custom(name))([rollout(0.0), rollout(1.0)])


def test_rewards_that_overflow_do_not_end_the_run() -> None:
    advantage = load_advantage(GroupAdvantageConfig(type="max_rl"))
    assert (
        advantage.compute([scored(1.0), scored(3e38, group_id="g1"), scored(-3e38, group_id="g1")])
        == [0.0] * 3
    )


@pytest.mark.parametrize(
    ("kind", "rewards", "sent", "reason"),
    [
        (
            "none",
            [3e38, 1.0, -2.0],
            [False, True, True],
            "advantage is 3e+38; the loss would overflow; scale it",
        ),
        ("rloo", [3e38, -3e38], [False, False], "advantage is inf; a number is needed"),
    ],
)
def test_advantages_that_cannot_train_are_rejected_one_by_one(
    kind: Any, rewards: list[float], sent: list[bool], reason: str
) -> None:
    judge = Judge("run", load_advantage(GroupAdvantageConfig(type=kind)), filter_zero_advantages=True)
    verdicts = judge(
        [
            Rollout(f"g0-r{index}", "g0", Example("0", []), "env", 1.0, [Turn([5], COMPLETION, "")], reward)
            for index, reward in enumerate(rewards)
        ]
    )
    assert [verdict.outcome for verdict in verdicts] == [
        Flow.SENT if each else State.REJECTED for each in sent
    ]
    assert verdicts[0].reason == f"sample: {reason}"


COMPLETION = Completion([7], [-0.5], [(0, 1)], "stop")


def test_missing_function_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator\.advantage\.import_path = 'nowhere:f'"):
        load_advantage(CustomAdvantageConfig(type="custom", import_path="nowhere:f"))
