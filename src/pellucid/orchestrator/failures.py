"""Rollouts that fail or are lost: how each is recorded and logged, and when there are too many.

- A failed rollout is data: type, message and line of the environment's code are kept in the rollout, and the
  scheduler attempts it again up to `max_retries` times. Tracebacks are for whoever mends the environment:
  `FailureLog` logs each of them once.
- Groups in a row that give nothing to train on are a drought, and a reason to stop:

    a group of which ...                              counts against
    every rollout failed, was rejected or is stale    max_fruitless_groups, max_signalless_groups
    all that is left is filtered, or has advantage 0  max_signalless_groups
    something is ready to be sent                     nothing: the drought is over

- Slow rollouts grow old and long ones fail: dropping them teaches the policy to be quick. `DropAudit`
  compares lengths and rewards of what is dropped and kept by Welch's z, environments by the z of their share;
  beyond `SIGNIFICANT` it is no chance. Stale rollouts that were cut short count with the tokens they had, so
  their lengths tell something only if longer.

    stale 40 of 1,040 rollouts; length 812 against 403 (z 9.1); reward 0.31 against 0.52 (z -4.2)
"""

import asyncio
import logging
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pellucid.config.imports import describe
from pellucid.data import Rollout
from pellucid.data.plain import clip_middle, encodable, printable
from pellucid.errors import PellucidError, UserCodeError
from pellucid.ledger import Flow, State
from pellucid.metrics import Moments
from pellucid.orchestrator.verdict import Outcome, Verdict

log = logging.getLogger(__name__)

_MAX_ERROR = 10_000  # characters that are kept of an error, and ten times as many of its traceback

EMPTY = "EmptyRollout"
"""Error type of a rollout in which nothing was sampled."""

LOST = {State.FAILED_ROLLOUT, State.DROPPED_GROUP, State.STALE, State.REJECTED}
"""Outcomes that a user did not ask for."""

_LEFT_OUT: tuple[Outcome, ...] = (State.ZERO_ADVANTAGE, State.FILTERED)
"""Outcomes of rollouts that did work: they were scored, and then not wanted."""

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


def fail(rollout: Rollout, error_type: str, error: str) -> None:
    rollout.error_type = encodable(error_type)
    rollout.error = clip_middle(printable(error), _MAX_ERROR)


def fail_by(rollout: Rollout, error: BaseException) -> None:
    """Records the exception that ended an attempt; where the environment's code raised it, with traceback."""
    name, culprit = type(error).__name__, None
    if isinstance(error, PellucidError):
        reason = f"{name}: {error}"
        culprit = error.__cause__ if isinstance(error, UserCodeError) else None
    elif isinstance(error, asyncio.CancelledError):
        reason = f"{name}: the attempt was cancelled" if is_being_cancelled() else describe(error)
    else:
        reason, culprit = describe(error), error
    fail(rollout, name, reason)
    if culprit is not None:
        shown = "".join(traceback.format_exception(culprit))
        rollout.traceback = clip_middle(printable(shown), 10 * _MAX_ERROR)


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled; if not, the environment itself raised the CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def pause_before(attempt: int, backoff_s: float) -> float:
    """Returns the seconds before an attempt, which double with each failure: 0, `backoff_s`, twice that, …"""
    return backoff_s * 2 ** (attempt - 1) if attempt else 0.0


class FailureLog:
    """Failed rollouts in the log: one line each, with the traceback where an environment fails anew."""

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def note(self, rollout: Rollout) -> None:
        frames = (line for line in rollout.traceback.splitlines() if line.startswith("  File "))
        failure = (rollout.env_name, rollout.error_type or "", *frames)
        is_new = failure not in self._known
        self._known.add(failure)
        detail = f"\n{rollout.traceback.rstrip()}" if rollout.traceback and is_new else ""
        log.warning(
            "rollout %s of %s failed: %s%s", rollout.rollout_id, rollout.env_name, rollout.error, detail
        )


def describe_loss(verdict: Verdict) -> str:
    """`rollout g3-r0 of math, failed_rollout: ValueError: no answer`, on one line."""
    rollout, reason = verdict.rollout, " ".join(verdict.reason.split())
    return f"rollout {rollout.rollout_id} of {rollout.env_name}, {verdict.outcome.value}: {reason}"


def is_dropped(verdicts: Sequence[Verdict]) -> bool:
    """Whether failures left nothing of the group."""
    return all(verdict.outcome in (State.FAILED_ROLLOUT, State.DROPPED_GROUP) for verdict in verdicts)


def is_partial(verdicts: Sequence[Verdict], size: int) -> bool:
    """Whether the group was judged, but without rollouts that failed. A group cut short is never judged."""
    cut_short = any(verdict.outcome in (State.CANCELLED, State.STALE) for verdict in verdicts)
    return count_survivors(verdicts) < size and not is_dropped(verdicts) and not cut_short


def count_survivors(verdicts: Sequence[Verdict]) -> int:
    """Rollouts of the group that did not fail; a retry that went well is one."""
    return sum(verdict.outcome is not State.FAILED_ROLLOUT for verdict in verdicts)


def log_losses(verdicts: Sequence[Verdict], size: int) -> None:
    """Logs a group that lacks rollouts, in counts: each failure was logged when it happened."""
    rollout, num_survivors = verdicts[0].rollout, count_survivors(verdicts)
    if is_dropped(verdicts) or is_partial(verdicts, size):
        fate = "dropped" if is_dropped(verdicts) else f"is partial and goes on with {num_survivors}"
        failed = f"{size - num_survivors} of {size} rollouts failed ({len(verdicts)} attempts)"
        log.warning("group %s of %s %s: %s", rollout.group_id, rollout.env_name, fate, failed)
    for verdict in verdicts:
        if verdict.outcome is State.REJECTED:
            rollout_id = verdict.rollout.rollout_id
            log.warning("rollout %s of %s rejected: %s", rollout_id, rollout.env_name, verdict.reason)


@dataclass(slots=True)
class Drought:
    """The groups in a row, up to the latest, that gave nothing to train on."""

    num_fruitless: int = 0
    """Latest groups in a row of which every rollout was lost."""

    kinds: Counter[Outcome] = field(default_factory=Counter)
    """Number of groups by outcome."""

    total_reward: float = 0.0
    """Sum of the mean rewards of the groups without a signal."""

    num_unrewarded: int = 0
    """Groups without a signal in which no rollout got more than 0."""

    last_loss: str = ""

    @property
    def num_groups(self) -> int:
        return self.kinds.total()

    def add(self, verdicts: Sequence[Verdict]) -> None:
        """Adds a group of which no rollout will be sent."""
        outcomes = Counter(verdict.outcome for verdict in verdicts)
        kind = next((kind for kind in _LEFT_OUT if kind in outcomes), outcomes.most_common(1)[0][0])
        typical = [verdict for verdict in verdicts if verdict.outcome is kind]
        self.kinds[kind] += 1
        self.num_fruitless = 0 if kind in _LEFT_OUT else self.num_fruitless + 1
        if kind is State.ZERO_ADVANTAGE:
            rewards = [verdict.rollout.reward or 0.0 for verdict in typical]
            self.total_reward += sum(rewards) / len(rewards)
            self.num_unrewarded += max(rewards) <= 0
        else:
            self.last_loss = describe_loss(typical[-1])

    def reason_to_stop(self, max_fruitless: int, max_signalless: int) -> str | None:
        """Returns why the run should stop; None while neither limit is reached."""
        if self.num_fruitless >= max_fruitless:
            return (
                f"orchestrator.max_fruitless_groups = {max_fruitless}: as many groups in a row were lost "
                f"whole; the last: {self.last_loss}"
            )
        if self.num_groups < max_signalless:
            return None
        [(kind, number)] = self.kinds.most_common(1)
        why = self._explain_zeros() if kind is State.ZERO_ADVANTAGE else f"the last: {self.last_loss}"
        return (
            f"orchestrator.max_signalless_groups = {max_signalless}: as many groups in a row gave nothing "
            f"to train on, {number} of them for {kind.value}; {why}"
        )

    def _explain_zeros(self) -> str:
        """Says whether the task is too hard or solved. Only the user knows the largest possible reward."""
        number = self.kinds[State.ZERO_ADVANTAGE]
        reward = f"their mean reward is {self.total_reward / number:.3f}"
        if self.num_unrewarded == number:
            return (
                f"{reward}, and no rollout got more than 0: the task is too hard for the model, or the "
                "environment never rewards; look at replies in rollouts/step_N/train_rollouts.jsonl, give it "
                "easier examples or a reward for parts of the task, or raise "
                "orchestrator.rollouts_per_example"
            )
        if self.num_unrewarded:
            return (
                f"{reward}: in {self.num_unrewarded} of {number} groups no rollout got more than 0, in the "
                "others all got the same: each example is too hard for the model or solved; give the "
                "environment examples in between, or raise orchestrator.rollouts_per_example or the limit"
            )
        return (
            f"{reward}, the same for every rollout of a group: the task is solved if that is the most it can "
            "give; stop here, give the environment harder examples, or raise "
            "orchestrator.rollouts_per_example or the limit"
        )


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
        self.reward += _NONE if reward is None else Moments.of_one(reward)

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
