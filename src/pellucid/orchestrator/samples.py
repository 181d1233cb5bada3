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
from itertools import chain

import numpy as np

from pellucid.data import Rollout, TrainingMode, TrainingSample, Turn


def build_samples(rollout: Rollout, *, run_id: str, advantage: float) -> list[TrainingSample]:
    """Raises DataError where a turn cannot be trained on."""
    return [
        _build_sample(
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
            stop_reason=turns[-1].completion.finish_reason,
            role_spans=turns[-1].role_spans,
            training_mode=TrainingMode.RL.value,
        )
        for index, turns in enumerate(
            _branches([turn for turn in rollout.turns if turn.completion.token_ids])
        )
    ]


def _branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    branches: list[list[Turn]] = []
    for turn in turns:
        branch = next((branch for branch in reversed(branches) if _extends(branch[-1], turn)), None)
        if branch is None:
            branches.append([turn])
        else:
            branch.append(turn)
    return branches


def _extends(last: Turn, turn: Turn) -> bool:
    num_prompt, num_known = len(last.prompt_ids), len(last.prompt_ids) + len(last.completion.token_ids)
    return (
        list(turn.prompt_ids[:num_prompt]) == list(last.prompt_ids)
        and list(turn.prompt_ids[num_prompt:num_known]) == last.completion.token_ids
    )


def _build_sample(turns: Sequence[Turn], **values: object) -> TrainingSample:
    token_ids = [*turns[-1].prompt_ids, *turns[-1].completion.token_ids]
    sampled = np.zeros(len(token_ids), np.bool_)
    loss_mask = np.zeros(len(token_ids), np.bool_)
    for turn in turns:
        start = len(turn.prompt_ids)
        stop = start + len(turn.completion.token_ids)
        sampled[start:stop] = True
        loss_mask[start:stop] = turn.trainable
    runs = np.array([run for turn in turns for run in turn.completion.policy_versions], np.int32).reshape(
        -1, 2
    )
    return TrainingSample.build(
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampled=sampled,
        inference_logprobs=list(chain.from_iterable(turn.completion.logprobs for turn in turns)),
        policy_versions=np.repeat(runs[:, 0], runs[:, 1]),
        **values,
    )
