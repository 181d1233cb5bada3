"""From the rollouts of final groups to verdicts: advantages, filters, samples. Pure.

- Each rollout has exactly one outcome, with its reason: a final state of the ledger, or `sent`; then the
  trainer decides. Where several states fit, the first in the ledger's order is the outcome: a failed rollout
  in a stale group has failed.
- A filter sees a whole group and its advantages, which are known by then and do not change: the rollouts that
  are left keep what was computed with all of them.
- Every sampled token of a rollout is in exactly one sample, where it may train:

    turn 0   prompt a b       completion X Y
    turn 1   prompt a b c     completion W      extends nothing: a branch, a sample of its own
    turn 2   prompt a b X Y d completion Z      extends turn 0 exactly: the same sample
    turn 3   prompt a b X Y e completion V      so does this, but turn 0 has gone on: X, Y train in its sample
    turn 4   prompt a b d     (cut short)       nothing was sampled: no sample

    sample 0   a b X Y d Z        sample 1   a b c W        sample 2   a b X Y e V
    sampled    . . x x . x                   . . . x                   . . . . . x
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pellucid.config import FilterConfig
from pellucid.config.imports import describe, load_function
from pellucid.data import PackedArray, Rollout, TrainingSample, Turn, join_columns, join_experts
from pellucid.data.images import IMAGE
from pellucid.errors import ConfigError, DataError, UserCodeError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.advantage import Advantage, are_equal

Outcome = State | Literal[Flow.SENT]

_PRECEDENCE: dict[Outcome, int] = {state: order for order, state in enumerate((*State, Flow.SENT))}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rollout, and what became of it."""

    rollout: Rollout
    outcome: Outcome
    reason: str = ""
    advantage: float | None = None
    samples: Sequence[TrainingSample] = ()
    """Samples to train on; empty unless sent."""

    @property
    def is_sent(self) -> bool:
        return self.outcome is Flow.SENT

    def overruled(self, state: State, reason: str) -> "Verdict":
        """Returns the verdict when `state` fits the rollout as well."""
        if _PRECEDENCE[self.outcome] <= _PRECEDENCE[state]:
            return self
        return replace(self, outcome=state, reason=reason, samples=())


@dataclass(frozen=True, slots=True)
class FilterInputs:
    rollouts: Sequence[Rollout]
    """One group, of any size: those that did not fail."""

    advantages: Sequence[float]
    """One per rollout."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter function, and the checks on what it returns."""

    name: str
    function: Callable[[FilterInputs], Iterable[bool]]
    """Returns for each rollout whether it may train."""

    def __call__(self, inputs: FilterInputs) -> list[bool]:
        where = f"filter {self.name!r}, group {inputs.rollouts[0].group_id!r}"
        try:
            keeps = [bool(keep) for keep in self.function(inputs)]
        except Exception as error:
            raise UserCodeError(f"{where}: {describe(error)}") from error
        if len(keeps) != len(inputs.rollouts):
            raise ConfigError(
                f"{where}: {len(keeps)} answers for {len(inputs.rollouts)} rollouts; return one per rollout"
            )
        return keeps


def load_filter(config: FilterConfig) -> Filter:
    return Filter(config.import_path, load_function(config.import_path, config.kwargs, "orchestrator.filter"))


@dataclass(frozen=True, slots=True)
class Judge:
    """The rules by which the survivors of groups get their verdicts."""

    run_id: str
    advantage: Advantage
    filter_zero_advantages: bool
    filters: Sequence[Filter] = ()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Returns one verdict per rollout of these groups, whose rollouts come one after the other; `sent`
        means that the rollout may be sent."""
        advantages = iter(self.advantage(rollouts))
        verdicts: list[Verdict] = []
        for _, members in groupby(rollouts, lambda rollout: rollout.group_id):
            group = list(members)
            verdicts += self._judged(group, list(islice(advantages, len(group))))
        fit = iter(self._with_samples([verdict for verdict in verdicts if verdict.is_sent]))
        return [next(fit) if verdict.is_sent else verdict for verdict in verdicts]

    def _judged(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[Verdict]:
        """Returns the verdicts on one group, without samples."""
        removed_by: list[str | None] = [None] * len(rollouts)
        for each in self.filters:
            for index, keep in enumerate(each(FilterInputs(rollouts, advantages))):
                if not keep and removed_by[index] is None:
                    removed_by[index] = each.name
        verdicts = []
        for rollout, advantage, filtered_by in zip(rollouts, advantages, removed_by, strict=True):
            if filtered_by is not None:
                verdicts.append(Verdict(rollout, State.FILTERED, f"removed by {filtered_by}", advantage))
            elif self.filter_zero_advantages and advantage == 0:
                no_signal = are_equal([rollout.reward or 0.0 for rollout in rollouts])
                why_zero = "the rewards of its group are equal" if no_signal else "advantage is 0"
                verdicts.append(Verdict(rollout, State.ZERO_ADVANTAGE, why_zero, advantage))
            else:
                verdicts.append(Verdict(rollout, Flow.SENT, "", advantage))
        return verdicts

    def _with_samples(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Adds samples to the verdicts; rollouts whose samples cannot train become `rejected`."""
        try:
            columns = [_columns(each.rollout, self.run_id, each.advantage or 0.0) for each in verdicts]
            # All together: checking many samples takes hardly longer than checking one.
            samples = iter(TrainingSample.build_all(list(chain.from_iterable(columns))))
        except DataError as error:
            if len(verdicts) == 1:
                return [replace(verdicts[0], outcome=State.REJECTED, reason=str(error))]
            return [verdict for each in verdicts for verdict in self._with_samples([each])]
        return [
            Verdict(verdict.rollout, Flow.SENT, "", verdict.advantage, list(islice(samples, len(each))))
            for verdict, each in zip(verdicts, columns, strict=True)
        ]


def build_samples(rollout: Rollout, *, run_id: str, advantage: float) -> list[TrainingSample]:
    """Makes the samples of a rollout; raises DataError if a turn cannot be trained on."""
    return TrainingSample.build_all(_columns(rollout, run_id, advantage))


def token_sequences(rollout: Rollout) -> list[NDArray[np.integer[Any]]]:
    """Returns the token ids of each sample that the rollout gives."""
    return [turns[-1].known_ids for turns in rollout.branches()]


def _columns(rollout: Rollout, run_id: str, advantage: float) -> list[dict[str, Any]]:
    """Returns the columns of each sample of the rollout."""
    return [
        {
            **_token_columns(turns),
            "run_id": run_id,
            "group_id": rollout.group_id,
            "rollout_id": rollout.rollout_id,
            "sample_id": f"{rollout.rollout_id}-{index}",
            "env_name": rollout.env_name,
            "example_id": rollout.example.example_id,
            "reward": rollout.reward,
            "advantage": advantage,
            "temperature": rollout.temperature,
            "stop_reason": turns[-1].finish_reason,
            "role_spans": turns[-1].role_spans,
            "training_mode": rollout.training_mode.value,
            "teacher_logprobs": rollout.teacher_logprobs[index] if rollout.teacher_logprobs else None,
        }
        for index, turns in enumerate(rollout.branches())
    ]


def _token_columns(turns: Sequence[Turn]) -> dict[str, Any]:
    token_ids = turns[-1].known_ids
    spans = [(turn.num_prompt_tokens, turn.num_tokens) for turn in turns]
    trainable = [span for span, turn in zip(spans, turns, strict=True) if turn.trainable]
    runs = [run for turn in turns for run in turn.policy_versions]
    tokens = [turn.tokens for turn in turns]
    return {
        "token_ids": token_ids,
        "loss_mask": PackedArray.of_spans(trainable, len(token_ids)),
        "sampled": PackedArray.of_spans(spans, len(token_ids)),
        "inference_logprobs": np.concatenate([each.logprobs for each in tokens]),
        "policy_versions": PackedArray.of_runs(runs, np.int32),
        "routed_experts": join_experts([each.routed_experts for each in tokens]),
        "expert_weights": join_experts([each.expert_weights for each in tokens]),
        **_image_columns(turns),
        **join_columns(turns),
    }


def _image_columns(turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the images of a sequence; a token that the model sampled stands for none, whatever its id."""
    if turns[-1].images is None:
        return {}
    mm_tensors, token_id = turns[-1].images
    types = np.where(turns[-1].known_ids == token_id, IMAGE, 0).astype(np.uint8)
    for turn in turns:
        types[turn.num_prompt_tokens : turn.num_known] = 0
    return {"mm_tensors": mm_tensors, "mm_token_type_ids": types}
