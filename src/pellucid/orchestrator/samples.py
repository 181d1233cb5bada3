"""A rollout's turns to training samples. Every sampled token is in exactly one sample, where it may train.

turn 0   prompt a b       completion X Y
turn 1   prompt a b c     completion W      extends nothing: a branch, a sample of its own
turn 2   prompt a b X Y d completion Z      extends turn 0 exactly: the same sample
turn 3   prompt a b X Y e completion V      so does this, but turn 0 has gone on: X and Y train in its sample
turn 4   prompt a b d     (cut short)       nothing was sampled: no sample

sample 0   a b X Y d Z        sample 1   a b c W        sample 2   a b X Y e V
sampled    . . x x . x                   . . . x                   . . . . . x
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data import PackedArray, Rollout, TrainingSample, Turn, join_columns, join_experts


def build_samples(rollout: Rollout, *, run_id: str, advantage: float) -> list[TrainingSample]:
    """Makes the samples of a rollout; raises DataError if a turn cannot be trained on."""
    return TrainingSample.build_all(_columns_of(rollout, run_id, advantage))


def build_group(
    rollouts: Sequence[Rollout], advantages: Sequence[float], *, run_id: str
) -> list[list[TrainingSample]]:
    """Calls `build_samples` for each rollout, validated together: one bad sample raises for all."""
    columns = [
        _columns_of(rollout, run_id, advantage)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]
    samples = iter(TrainingSample.build_all(list(chain.from_iterable(columns))))
    return [list(islice(samples, len(each))) for each in columns]


def _columns_of(rollout: Rollout, run_id: str, advantage: float) -> list[dict[str, Any]]:
    """Returns the columns of each sample of the rollout."""
    return [
        _columns(
            turns,
            run_id=run_id,
            group_id=rollout.group_id,
            rollout_id=rollout.rollout_id,
            sample_id=f"{rollout.rollout_id}-{index}",
            env_name=rollout.env_name,
            example_id=rollout.example.example_id,
            reward=rollout.reward,
            advantage=advantage,
            temperature=rollout.temperature,
            stop_reason=turns[-1].finish_reason,
            role_spans=turns[-1].role_spans,
            training_mode=rollout.training_mode.value,
            teacher_logprobs=_teacher_logprobs(rollout, index),
        )
        for index, turns in enumerate(_branches(rollout))
    ]


def token_sequences(rollout: Rollout) -> list[NDArray[np.integer[Any]]]:
    """Returns the token ids of each sample that the rollout gives."""
    return [turns[-1].known_ids for turns in _branches(rollout)]


def _teacher_logprobs(rollout: Rollout, index: int) -> NDArray[np.float32] | None:
    return np.frombuffer(rollout.teacher_logprobs[index], np.float32) if rollout.teacher_logprobs else None


def _branches(rollout: Rollout) -> list[list[Turn]]:
    branches: list[list[Turn]] = []
    for turn in (turn for turn in rollout.turns if turn.num_tokens):
        branch = next((branch for branch in reversed(branches) if turn.extends(branch[-1])), None)
        if branch is None:
            branches.append([turn])
        else:
            branch.append(turn)
    return branches


def _columns(turns: Sequence[Turn], **values: object) -> dict[str, Any]:
    token_ids = turns[-1].known_ids
    spans = [(turn.num_prompt_tokens, turn.num_tokens) for turn in turns]
    trainable = [span for span, turn in zip(spans, turns, strict=True) if turn.trainable]
    runs = [run for turn in turns for run in turn.policy_versions]
    return {
        "token_ids": token_ids,
        "loss_mask": PackedArray.of_spans(trainable, len(token_ids)),
        "sampled": PackedArray.of_spans(spans, len(token_ids)),
        "inference_logprobs": np.concatenate([turn.tokens.logprobs for turn in turns]),
        "policy_versions": PackedArray.of_runs(runs, np.int32),
        "routed_experts": join_experts([turn.tokens.routed_experts for turn in turns]),
        **join_columns(turns),
        **values,
    }
