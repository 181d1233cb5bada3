"""Do the rollouts that are dropped differ from those that are kept? Pure.

Slow rollouts grow old and long ones fail: dropping them teaches the policy to be quick. Lengths and rewards
are compared by Welch's z, environments by the z of their share; beyond `SIGNIFICANT` it is no chance. Stale
rollouts that were cut short count with the tokens they had, so their lengths tell something only if longer.

    stale 40 of 1,040 rollouts; length 812 against 403 (z 9.1); reward 0.31 against 0.52 (z -4.2)
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pellucid.ledger import Flow, State
from pellucid.metrics import Moments

SIGNIFICANT = 4.0
MIN_ROLLOUTS = 20
"""Rollouts needed among the dropped and among the kept; with fewer, no finding is reported."""

KEPT = (Flow.SENT, State.ZERO_ADVANTAGE)
"""Outcomes that count as kept: no accident (failure, age) kept these rollouts from training."""

REMEDIES: Mapping[State, str] = {
    State.FAILED_ROLLOUT: "find out why they fail: `error` in rollouts/step_N/train_rollouts.jsonl",
    State.DROPPED_GROUP: "find out why rollouts fail: where groups are scored, one takes its group along",
    State.STALE: "set orchestrator.pace_sampling, or raise orchestrator.max_off_policy_steps",
    State.REJECTED: "find out what is wrong with them: `reason` in rollouts/step_N/train_rollouts.jsonl",
}
"""Remedy for each audited state. Filtered rollouts are not audited: filters are meant to select."""

_NONE = Moments(0.0, 0.0, 0.0, -math.inf)


@dataclass(slots=True)
class _Side:
    length: Moments = _NONE
    reward: Moments = _NONE
    environments: Counter[str] = field(default_factory=Counter)

    @property
    def num_rollouts(self) -> int:
        return self.environments.total()

    def add(self, env_name: str, num_tokens: int, reward: float | None) -> None:
        self.environments[env_name] += 1
        self.length += Moments.of_one(num_tokens)
        if reward is not None:
            self.reward += Moments.of_one(reward)

    def share(self, env_name: str) -> Moments:
        number = self.environments[env_name]
        return Moments.of(self.num_rollouts, number, number, 1.0)


@dataclass(frozen=True, slots=True)
class BiasGap:
    what: str
    dropped: float
    kept: float
    z: float

    def __str__(self) -> str:
        return f"{self.what} {self.dropped:.3g} against {self.kept:.3g} (z {self.z:.1f})"


@dataclass(frozen=True, slots=True)
class BiasFinding:
    """How the rollouts that were dropped for one reason differ from those that were kept, beyond chance."""

    state: State
    num_dropped: int
    num_kept: int
    differences: list[BiasGap]

    def __str__(self) -> str:
        total = self.num_dropped + self.num_kept
        return (
            f"what is dropped as {self.state.value} ({self.num_dropped:,} of {total:,} rollouts) differs "
            f"from what is kept: {'; '.join(map(str, self.differences))}. That biases training: "
            f"{REMEDIES[self.state]}"
        )


class DropAudit:
    def __init__(self) -> None:
        self._kept = _Side()
        self._dropped = {state: _Side() for state in REMEDIES}

    def add(self, outcome: str, env_name: str, num_tokens: int, reward: float | None) -> None:
        if outcome in KEPT:
            self._kept.add(env_name, num_tokens, reward)
        elif outcome in REMEDIES:
            self._dropped[State(outcome)].add(env_name, num_tokens, reward)

    def findings(self) -> list[BiasFinding]:
        return [
            BiasFinding(state, side.num_rollouts, self._kept.num_rollouts, differences)
            for state, side in self._dropped.items()
            if (differences := _differences(side, self._kept, may_be_cut=state is State.STALE))
        ]


def _differences(dropped: _Side, kept: _Side, *, may_be_cut: bool) -> list[BiasGap]:
    """Returns the significant differences, the largest |z| first."""
    if min(dropped.num_rollouts, kept.num_rollouts) < MIN_ROLLOUTS:
        return []
    pairs = [("reward", dropped.reward, kept.reward)]
    if not may_be_cut or dropped.length.mean > kept.length.mean:
        pairs.append(("length", dropped.length, kept.length))
    environments = sorted({*kept.environments, *dropped.environments})
    pairs += [(f"share of {env}", dropped.share(env), kept.share(env)) for env in environments]
    found = [BiasGap(what, a.mean, b.mean, z_score(a, b)) for what, a, b in pairs]
    return sorted((each for each in found if abs(each.z) > SIGNIFICANT), key=lambda each: -abs(each.z))


def z_score(a: Moments, b: Moments) -> float:
    """Returns Welch's z: the difference of the means in standard errors; 0 where that error is 0."""
    if not (a.weight and b.weight):
        return 0.0
    error = math.sqrt(a.squares / a.weight**2 + b.squares / b.weight**2)
    return (a.mean - b.mean) / error if error else 0.0
