"""Settled groups and the batch they gave, as metrics and as lines to read. Pure.

Rewards are those of every scored rollout settled since the last batch, filtered ones included, so that
the curve does not depend on the filter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pellucid.data import NOT_OURS, Rollout, TokenTable
from pellucid.data.plain import clip_middle, printable
from pellucid.errors import DataError
from pellucid.ledger import State
from pellucid.metrics import Mean, MetricSet, Moments, NamedMoments, Sum
from pellucid.orchestrator.attempt import EMPTY
from pellucid.orchestrator.verdict import Verdict

Groups = Sequence[Sequence[Verdict]]

LOST = {State.FAILED_ROLLOUT, State.DROPPED_GROUP, State.STALE, State.REJECTED}
"""Outcomes that a user did not ask for."""

_LINE_WIDTH = 100 - len("12:34:56 INFO ")


_COUNTS = (
    "errored_rollouts",
    "empty_rollouts",
    "filtered_rollouts",
    "lost_rollouts",
    "dropped_groups",
    "partial_groups",
    "zero_advantage_groups",
)


def zero_metrics(env_names: Sequence[str]) -> MetricSet:
    """Returns the counts of a step for which nothing is settled yet."""
    metrics = MetricSet()
    for name in _COUNTS:
        for scope in ("all", *env_names):
            metrics.add(f"{name}/{scope}", Sum(0))
    return metrics


def add_groups(metrics: MetricSet, groups: Groups, size: int) -> None:
    """Adds settled groups; `size` is the number of rollouts of a whole one."""
    for verdicts in groups:
        _add_group(metrics, verdicts, size)
        for verdict in verdicts:
            _add_rollout(metrics, verdict)


def step_line(step: int, values: Mapping[str, float]) -> str:
    """`step    7  reward 0.812  128 rollouts  4.2k tokens  off-policy 0.6  1.4 s, 0.2 waiting  3 lost`."""
    num_lost = values["lost_rollouts/all"]
    return (
        f"step {step:4d}  reward {values['reward/all']:.3f}  {values['batch_rollouts']:.0f} rollouts  "
        f"{values['batch_tokens'] / 1000:.1f}k tokens  {_off_policy(values)}"
        f"{values['time/batch_s']:.1f} s, {values['time/wait_weights_s']:.1f} waiting"
        + (f"  {num_lost:.0f} lost" if num_lost else "")
    )


def _off_policy(values: Mapping[str, float]) -> str:
    """Formats the mean off-policy level; empty if the policy sampled none of the tokens."""
    level = values.get("off_policy_level/all/mean")
    return "" if level is None else f"off-policy {level:.1f}  "


def sample_line(step: int, rollout: Rollout) -> str:
    """`step    7  g54-r2  reward 0.750  "Reverse: stone" → "enots" (6 tokens, stop)`, in 100 columns."""
    asked = _content(rollout.example.messages[-1]) if rollout.example.messages else ""
    end = f"({rollout.num_sampled} tokens, {rollout.stop_reason})"
    start = f"step {step:4d}  {rollout.rollout_id}  reward {rollout.reward or 0.0:.3f}  "
    room = _LINE_WIDTH - len(f"{start}{_quote('')} → {_quote('')} {end}")
    asked = shorten(asked, room // 2)
    said = shorten(rollout.turns[-1].text if rollout.turns else "", room - len(asked))
    return f"{start}{_quote(asked)} → {_quote(said)} {end}"


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, of whichever form: parts are joined, what is no text is shown as it is."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts = [part.get("text", part) if isinstance(part, Mapping) else part for part in content]
    return " ".join(map(str, texts))


def shorten(text: str, width: int) -> str:
    """On one line, without control characters; the middle of a long text is left out."""
    return clip_middle(printable(" ".join(text.split())), width)


def _quote(text: str) -> str:
    return f'"{text}"'


def waiting_line(step: int, groups: Groups) -> str:
    """`step    7  no batch yet; settled: 250 zero_advantage, 6 failed_rollout`."""
    outcomes = Counter(verdict.outcome.value for verdicts in groups for verdict in verdicts)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return f"step {step:4d}  no batch yet; settled: {counts}"


def _add_group(metrics: MetricSet, verdicts: Sequence[Verdict], size: int) -> None:
    outcomes = {verdict.outcome for verdict in verdicts}
    kinds = {
        "dropped_groups": is_dropped(verdicts),
        "partial_groups": is_partial(verdicts, size),
        "zero_advantage_groups": State.ZERO_ADVANTAGE in outcomes
        and outcomes <= {State.FAILED_ROLLOUT, State.ZERO_ADVANTAGE},
    }
    for name, applies in kinds.items():
        for scope in ("all", verdicts[0].rollout.env_name):
            metrics.add(f"{name}/{scope}", Sum(applies))


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


def _add_rollout(metrics: MetricSet, verdict: Verdict) -> None:
    rollout = verdict.rollout
    for scope in ("all", rollout.env_name):
        metrics.add(f"lost_rollouts/{scope}", Sum(verdict.outcome in LOST))
        metrics.add(f"filtered_rollouts/{scope}", Sum(verdict.outcome is State.FILTERED))
        if verdict.outcome is State.FAILED_ROLLOUT:
            name = "empty_rollouts" if rollout.error_type == EMPTY else "errored_rollouts"
            metrics.add(f"{name}/{scope}", Sum(1))
        elif rollout.reward is not None:
            metrics.add(f"reward/{scope}", NamedMoments.of_one(rollout.reward))
            metrics.add(f"completion_length/{scope}", Moments.of_one(rollout.num_sampled))
    if verdict.outcome is State.FAILED_ROLLOUT:
        metrics.add(f"error/{rollout.error_type}/count", Sum(1))
    elif rollout.reward is not None:
        for name, value in rollout.metrics.items():
            metrics.add(f"metrics/{rollout.env_name}/{name}", Mean(value, 1))


def add_off_policy_levels(metrics: MetricSet, step: int, table: TokenTable) -> None:
    """Adds the off-policy level of every token that the policy sampled; raises if one is negative."""
    is_ours = table["policy_versions"] != NOT_OURS
    levels = (step - table["policy_versions"])[is_ours]
    if levels.size and levels.min() < 0:
        raise DataError(
            f"the batch of step {step} has tokens of policy version {step - int(levels.min())}, which only a "
            "later batch makes: they are of another run's weights; give this run an inference server of its "
            "own, and go on with --resume"
        )
    # Names are compared once per sequence: sorting those of all tokens would hold up every other thread.
    names, which = np.unique(table["env_name"], return_inverse=True)
    owners = np.repeat(which, np.diff(table.sampled_offsets))[is_ours]
    scopes = [("all", levels), *((name, levels[owners == index]) for index, name in enumerate(names))]
    for scope, chosen in scopes:
        if chosen.size:
            squares = np.square(chosen, dtype=np.float64).sum()
            moments = Moments.of(chosen.size, float(chosen.sum()), float(squares), float(chosen.max()))
            metrics.add(f"off_policy_level/{scope}", moments)
