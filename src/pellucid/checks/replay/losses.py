"""Ratios, masks and losses again, from recorded logprobs and advantages, by the trainer's loss functions."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.config import LossConfig
from pellucid.data import TrainingMode
from pellucid.export.batch import ColumnBatch, Integers, Values
from pellucid.loss import LossInputs, LossRecord, Ratios, TokenLoss, loss_for, sequence_weights

NEEDED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")

RATIOS = ("log_importance_ratio", "importance_ratio", "prob_delta", "mismatch_kl")
MASKS = ("is_masked", "is_masked_high", "is_masked_low")


def replay_losses(step: ColumnBatch, config: LossConfig | None) -> dict[str, Values]:
    """Of all records of a step: `RATIOS`, `MASKS` and `token_loss` of each token; NaN where there is none.

    Without a loss, the tokens of rl have ratios alone.
    """
    losses = loss_for(config)
    weights = _weights(step, config)
    found = {name: np.full(step.num_tokens, np.nan, np.float32) for name in (*RATIOS, *MASKS, "token_loss")}
    for rows in micro_batches(step):
        tokens = step.tokens_of(rows)
        record = _loss(step.take(rows), losses)
        for name, values in record.columns().items():
            if values is not None:
                found[name][tokens] = values.detach().numpy()
    found["token_loss"] *= weights[step.owners]
    return found


def micro_batches(step: ColumnBatch) -> Iterator[Integers]:
    """The records of each, as they were trained; a loss may look at all of them together."""
    zeros = np.zeros(step.num_sequences, np.int64)
    keys = zip(
        step.columns.get("rank", zeros).tolist(),
        step.columns.get("micro_step", zeros).tolist(),
        modes_of(step).tolist(),
        strict=True,
    )
    members: dict[tuple[int, int, str], list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    for rows in members.values():
        yield np.array(rows, np.int64)


def modes_of(step: ColumnBatch) -> Values:
    return step.columns.get("training_mode", np.full(step.num_sequences, TrainingMode.RL.value, object))


def num_trainable(step: ColumnBatch) -> Integers:
    """Trainable tokens of each record."""
    counts = np.bincount(step.owners, step.columns["loss_mask"], minlength=step.num_sequences)
    return counts.astype(np.int64)


def _weights(step: ColumnBatch, config: LossConfig | None) -> NDArray[np.float32]:
    """Of each record's tokens in the step's mean. Records have trainable tokens: all that count are here."""
    weights = np.ones(step.num_sequences, np.float32)
    if config is not None and config.reduction != "token":
        chosen = np.flatnonzero(modes_of(step) == TrainingMode.RL.value)
        groups = step.columns.get("group_id", np.full(step.num_sequences, "", object))[chosen].tolist()
        weights[chosen] = sequence_weights(config.reduction, num_trainable(step)[chosen], groups)
    return weights


def _loss(part: ColumnBatch, losses: Mapping[str, TokenLoss]) -> LossRecord:
    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(part.columns[name]))

    trainer, inference = tensor("trainer_logprobs"), tensor("inference_logprobs")
    teacher = tensor("teacher_logprobs") if "teacher_logprobs" in part.columns else None
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=inference,
        advantages=tensor("advantages"),
        loss_mask=tensor("loss_mask"),
        teacher_logprobs=None if teacher is None or bool(teacher.isnan().all()) else teacher,
        ratios=Ratios.of(trainer, inference),
        lengths=part.lengths.tolist(),
    )
    return losses[modes_of(part)[0]](inputs)
