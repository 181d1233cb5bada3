"""Rewards of one group to advantages, one per rollout, in order. Pure.

    rewards [1, 0, 1, 1] -> [0.25, -0.75, 0.25, 0.25]

Numbers are float32, except for means: those are taken in float64 and rounded, so that equal rewards give
advantages of exactly 0 (in float32, the mean of three times 0.1 is not 0.1).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import extract_tb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.config import AdvantageConfig, CustomAdvantageConfig
from pellucid.config.imports import load_attribute
from pellucid.config.orchestrator import LengthPenaltyConfig
from pellucid.data import Rollout
from pellucid.errors import ConfigError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """What an advantage may depend on."""

    reward: float
    completion_tokens_per_turn: Sequence[int]
    tool_response_tokens: int
    env_name: str
    example_id: str
    group_id: str

    @classmethod
    def of(cls, rollout: Rollout) -> "ScoredRollout":
        if rollout.reward is None:
            raise ValueError(f"rollout {rollout.rollout_id} has no reward yet")
        spans = rollout.turns[-1].role_spans
        return cls(
            reward=rollout.reward,
            completion_tokens_per_turn=[len(turn.completion.token_ids) for turn in rollout.turns],
            tool_response_tokens=sum(stop - start for role, start, stop in spans if role == "tool"),
            env_name=rollout.env_name,
            example_id=rollout.example.example_id,
            group_id=rollout.group_id,
        )


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    rollouts: Sequence[ScoredRollout]
    """One group, of any size."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    advantages: list[float]


@dataclass(frozen=True, slots=True)
class Advantage:
    """An advantage function whose answers are checked."""

    name: str
    function: Callable[[AdvantageInputs], AdvantageOutputs]

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        inputs = AdvantageInputs([ScoredRollout.of(rollout) for rollout in rollouts])
        where = f"advantage function {self.name!r}, group {rollouts[0].group_id!r}"
        try:
            advantages = [float(advantage) for advantage in self.function(inputs).advantages]
        except Exception as error:
            frame = extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{where}: {type(error).__name__}: {error} (line {frame.lineno} of {frame.filename})"
            ) from error
        if len(advantages) != len(rollouts):
            raise ConfigError(
                f"{where}: {len(advantages)} advantages for {len(rollouts)} rollouts; return one per rollout"
            )
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if not math.isfinite(advantage):
                raise ConfigError(
                    f"{where}: advantage {advantage} for rollout {rollout.rollout_id!r} with reward "
                    f"{rollout.reward}; return finite numbers"
                )
        return advantages


def load_advantage(config: AdvantageConfig) -> Advantage:
    if isinstance(config, CustomAdvantageConfig):
        function = load_attribute(config.import_path, "orchestrator.advantage.import_path")
        return Advantage(config.import_path, partial(function, **config.kwargs))
    return Advantage(config.type, partial(default_advantage, length_penalty=config.length_penalty))


def default_advantage(inputs: AdvantageInputs, length_penalty: LengthPenaltyConfig) -> AdvantageOutputs:
    """Reward minus the group's mean; correct rollouts first gain by what they saved."""
    rewards = np.array([rollout.reward for rollout in inputs.rollouts], np.float32)
    if length_penalty.type != "none":
        rewards = _reward_savings(rewards, _costs(inputs, length_penalty))
    return AdvantageOutputs((rewards - _mean(rewards)).tolist())


def _costs(inputs: AdvantageInputs, penalty: LengthPenaltyConfig) -> Floats:
    if penalty.type == "turns":
        return np.array([len(rollout.completion_tokens_per_turn) for rollout in inputs.rollouts], np.float32)
    costs = [
        penalty.completion_weight * sum(rollout.completion_tokens_per_turn)
        + penalty.tool_response_weight * rollout.tool_response_tokens
        for rollout in inputs.rollouts
    ]
    return np.array(costs, np.float32)


def _reward_savings(rewards: Floats, costs: Floats) -> Floats:
    """Correct (the group's best) rewards times 1 + the share saved against the correct ones' mean."""
    correct = rewards >= rewards.max()
    mean_cost = _mean(costs[correct])
    if rewards.max() <= 0 or mean_cost <= 0:
        return rewards
    bonus = np.clip(1 - costs / mean_cost, 0, 1)
    return np.where(correct, rewards * (1 + bonus), rewards)


def _mean(values: Floats) -> Any:
    return np.float32(values.mean(dtype=np.float64))
