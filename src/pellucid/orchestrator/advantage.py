"""Rewards to advantages, one per rollout, in order. Pure.

    rewards of a group [1, 0, 1, 1] -> [0.25, -0.75, 0.25, 0.25]

The contract is one call per group. The built-in functions are written over columns of many groups, and one
group is the case of one; `Advantage.compute` gives them all groups at once.

Numbers are float32, except for sums: those are taken in float64, so that equal rewards give advantages of
exactly 0 (in float32, the mean of three times 0.1 is not 0.1).

Equal rewards in a group carry no signal, whichever function they are given to: its answers are rounding
errors (5e-17, or ±1 where they are divided by an equally small standard deviation), and count as exactly 0.
A function that shapes rewards, by length for example, returns the shaped ones, and those decide. `none` does
not compare the rollouts of a group, nor does any function of a group of one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.config import AdvantageConfig, CustomAdvantageConfig, DefaultAdvantageConfig
from pellucid.config.imports import describe, load_function
from pellucid.config.orchestrator import LengthPenaltyConfig
from pellucid.data import Rollout
from pellucid.errors import ConfigError, UserCodeError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One rollout as an advantage function sees it: reward, token counts, and the rollout itself if known."""

    reward: float
    completion_tokens_per_turn: Sequence[int]
    tool_response_tokens: int
    env_name: str
    example_id: str
    group_id: str | None = None
    """Rollouts with the same one belong together; without, those of the same example do."""

    rollout: Rollout | None = None
    """The whole rollout: its example, turns with texts and tokens, metrics and state. `pellucid replay` knows
    the turns without their tokens, and the example without `info`; None where rewards are all there is."""

    @classmethod
    def of(cls, rollout: Rollout) -> "ScoredRollout":
        if rollout.reward is None:
            raise ValueError(f"rollout {rollout.rollout_id} has no reward yet")
        return cls(
            reward=rollout.reward,
            completion_tokens_per_turn=[turn.num_tokens for turn in rollout.turns],
            tool_response_tokens=rollout.num_tool_tokens,
            env_name=rollout.env_name,
            example_id=rollout.example.example_id,
            group_id=rollout.group_id,
            rollout=rollout,
        )


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    rollouts: Sequence[ScoredRollout]
    """One group, of any size."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    advantages: list[float]
    rewards: Sequence[float] | None = None
    """The rewards that the function compared, one per rollout, if it shaped them; None: those it was given.
    Where they are all equal the group carries no signal, and its advantages count as 0."""


class Groups:
    """Which rollout is in which group; statistics are given to every member.

    Groups([0, 1, 0]).mean([1.0, 5.0, 2.0]) -> [1.5, 5.0, 1.5]
    """

    def __init__(self, numbers: ArrayLike) -> None:
        """Group numbers from 0 on, one per rollout."""
        self._numbers = np.asarray(numbers, np.intp)
        self._counts = np.bincount(self._numbers)
        self.sizes = self._counts[self._numbers]

    def sum(self, values: ArrayLike) -> NDArray[np.float64]:
        totals = np.bincount(self._numbers, np.asarray(values), len(self._counts))
        return totals.astype(np.float64)[self._numbers]

    def mean(self, values: ArrayLike) -> Floats:
        return (self.sum(values) / self.sizes).astype(np.float32)

    def max(self, values: Floats) -> Floats:
        highest = np.full(len(self._counts), -np.inf, np.float32)
        np.maximum.at(highest, self._numbers, values)
        return highest[self._numbers]


Columnar = Callable[[Sequence[ScoredRollout], Floats, Groups], Floats]
"""Rollouts, their rewards and their groups -> advantages."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """An advantage function, and the checks on what it returns."""

    name: str
    function: Callable[[AdvantageInputs], AdvantageOutputs]
    """Computes the advantages of one group."""

    columnar: Columnar | None = None
    """Computes the advantages of many groups at once; None: `function` is called per group."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Returns the advantages of one group."""
        return self.compute([ScoredRollout.of(rollout) for rollout in rollouts])

    def compute(self, rollouts: Sequence[ScoredRollout]) -> list[float]:
        """Returns the advantages of many groups, in the order of `rollouts`; groups may be interleaved."""
        if not rollouts:
            return []
        numbers: dict[object, int] = {}
        places = [numbers.setdefault(_group_of(rollout), len(numbers)) for rollout in rollouts]
        if self.columnar is not None:
            return _of_columns(self.columnar, rollouts, Groups(places))
        members: list[list[int]] = [[] for _ in numbers]
        for index, place in enumerate(places):
            members[place].append(index)
        result = [0.0] * len(rollouts)
        for group in members:
            answers = self._ask([rollouts[index] for index in group])
            for index, advantage in zip(group, answers, strict=True):
                result[index] = advantage
        return result

    def _ask(self, rollouts: Sequence[ScoredRollout]) -> list[float]:
        where = f"advantage function {self.name!r}, group {_group_of(rollouts[0])!r}"
        try:
            answer = self.function(AdvantageInputs(rollouts))
            if not isinstance(answer, AdvantageOutputs):
                raise TypeError(f"returned a {type(answer).__name__}; return AdvantageOutputs([…])")
            advantages = [float(advantage) for advantage in answer.advantages]
            shaped = None if answer.rewards is None else [float(reward) for reward in answer.rewards]
        except Exception as error:
            raise UserCodeError(f"{where}: {describe(error)}") from error
        if len(advantages) != len(rollouts):
            raise ConfigError(
                f"{where}: {len(advantages)} advantages for {len(rollouts)} rollouts; return one per rollout"
            )
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if not math.isfinite(advantage):
                raise ConfigError(
                    f"{where}: advantage {advantage} for a rollout with reward {rollout.reward}; return "
                    "finite numbers"
                )
        if shaped is not None and len(shaped) != len(rollouts):
            raise ConfigError(
                f"{where}: {len(shaped)} shaped rewards for {len(rollouts)} rollouts; return one per "
                "rollout, or none at all"
            )
        compared = [rollout.reward for rollout in rollouts] if shaped is None else shaped
        return [0.0] * len(rollouts) if are_equal(compared) else advantages


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether a group of several rollouts has one reward, in the precision in which advantages are computed.

    are_equal([0.1 + 0.2, 0.3]) -> True, are_equal([0.3]) -> False: there is nothing to compare it with.
    """
    return len(rewards) > 1 and len(set(np.asarray(rewards, np.float32).tolist())) == 1


def _group_of(rollout: ScoredRollout) -> object:
    return (rollout.env_name, rollout.example_id) if rollout.group_id is None else rollout.group_id


def load_advantage(config: AdvantageConfig) -> Advantage:
    if isinstance(config, CustomAdvantageConfig):
        function = load_function(config.import_path, config.kwargs, "orchestrator.advantage")
        return Advantage(config.import_path, function)
    columnar: Columnar
    if isinstance(config, DefaultAdvantageConfig):
        columnar = partial(default_advantages, length_penalty=config.length_penalty)
    else:
        columnar = _BUILT_IN[config.type]
    return Advantage(config.type, partial(_one_group, columnar), columnar)


def _one_group(columnar: Columnar, inputs: AdvantageInputs) -> AdvantageOutputs:
    one = Groups(np.zeros(len(inputs.rollouts), np.intp))
    return AdvantageOutputs(_of_columns(columnar, inputs.rollouts, one))


def _of_columns(columnar: Columnar, rollouts: Sequence[ScoredRollout], groups: Groups) -> list[float]:
    """Computes advantages in float32.

    Rewards near the largest float32 overflow to infinite advantages; the samples that get one are rejected
    later.
    """
    rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        advantages: list[float] = columnar(rollouts, rewards, groups).tolist()
    return advantages


def default_advantages(
    rollouts: Sequence[ScoredRollout], rewards: Floats, groups: Groups, length_penalty: LengthPenaltyConfig
) -> Floats:
    """Reward minus the group's mean; correct rollouts first gain by what they saved."""
    if length_penalty.type != "none":
        rewards = _reward_savings(rewards, _costs(rollouts, length_penalty), groups)
    return rewards - groups.mean(rewards)


def rloo_advantages(rollouts: Sequence[ScoredRollout], rewards: Floats, groups: Groups) -> Floats:
    """Reward minus the mean of the *others* of the group; alone, 0.

    That is n / (n − 1) times the distance from the mean of all.
    """
    scale = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return (rewards - groups.mean(rewards)) * scale.astype(np.float32)


def grpo_std_advantages(rollouts: Sequence[ScoredRollout], rewards: Floats, groups: Groups) -> Floats:
    """The distance from the group's mean in standard deviations (with n − 1); 0 where rewards are equal."""
    distances = rewards - groups.mean(rewards)
    variance = groups.sum(np.square(distances, dtype=np.float64)) / np.maximum(groups.sizes - 1, 1)
    return _ratio(distances, np.sqrt(variance).astype(np.float32))


def max_rl_advantages(rollouts: Sequence[ScoredRollout], rewards: Floats, groups: Groups) -> Floats:
    """The distance from the group's mean as a share of it: rare successes weigh more. 0 if it is not > 0."""
    mean = groups.mean(rewards)
    return _ratio(rewards - mean, mean)


def unchanged_rewards(rollouts: Sequence[ScoredRollout], rewards: Floats, groups: Groups) -> Floats:
    return rewards


_BUILT_IN: Mapping[str, Columnar] = {
    "rloo": rloo_advantages,
    "grpo_std": grpo_std_advantages,
    "max_rl": max_rl_advantages,
    "none": unchanged_rewards,
}


def _ratio(values: Floats, by: Floats) -> Floats:
    """Divides elementwise; 0 where `by` is not above 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by > 0)


def _costs(rollouts: Sequence[ScoredRollout], penalty: LengthPenaltyConfig) -> Floats:
    if penalty.type == "turns":
        return np.array([len(rollout.completion_tokens_per_turn) for rollout in rollouts], np.float32)
    costs = [
        penalty.completion_weight * sum(rollout.completion_tokens_per_turn)
        + penalty.tool_response_weight * rollout.tool_response_tokens
        for rollout in rollouts
    ]
    return np.array(costs, np.float32)


def _reward_savings(rewards: Floats, costs: Floats, groups: Groups) -> Floats:
    """Correct (the group's best) rewards times 1 + the share saved against the correct ones' mean."""
    best = groups.max(rewards)
    correct = rewards >= best
    mean_cost = (groups.sum(costs * correct) / groups.sum(correct)).astype(np.float32)
    bonus = np.clip(1 - _ratio(costs, mean_cost), 0, 1)
    applies = correct & (best > 0) & (mean_cost > 0)
    return np.where(applies, rewards * (1 + bonus), rewards)
