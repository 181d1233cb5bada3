"""Ratios, masks and losses again, from recorded logprobs and advantages.

`judge_losses` is the oracle's word on what was recorded; a custom loss, which it does not know, is asked
itself. `replay_losses` asks the trainer's own functions, also about settings that the run did not have.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.checks.oracle import loss_weights_of, ratios_of, token_losses
from pellucid.checks.oracle.losses import KNOWN
from pellucid.config import LossConfig
from pellucid.data import TrainingMode
from pellucid.data.schema import TOKEN_FIELDS
from pellucid.data.tensors import TokenTensors
from pellucid.export.batch import ColumnBatch, Integers, Values
from pellucid.loss import LossInputs, LossRecord, TokenLoss, loss_for, sequence_weights

NEEDED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")

RATIOS = ("log_importance_ratio", "importance_ratio", "prob_delta", "mismatch_kl")
MASKS = ("is_masked", "is_masked_high", "is_masked_low")


def replay_losses(step: ColumnBatch, config: LossConfig | None) -> dict[str, Values]:
    """Computes `RATIOS`, `MASKS` and `token_loss` of each token of a step; NaN where there is none.

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


def judge_losses(step: ColumnBatch, config: LossConfig | None) -> tuple[dict[str, Values], NDArray[np.bool_]]:
    """Computes what `replay_losses` does, by the oracle's formulas in float64.

    Also returns which tokens lie so close to a bound of the trust region that float32 may decide otherwise.
    """
    asked = replay_losses(step, config) if config is None or config.type not in KNOWN else None
    found = asked or {
        name: np.full(step.num_tokens, np.nan, np.float64) for name in (*RATIOS, *MASKS, "token_loss")
    }
    undecided = np.zeros(step.num_tokens, np.bool_)
    modes = modes_of(step)
    factors = _oracle_weights(step, config)
    for mode in dict.fromkeys(modes.tolist()):
        if mode == TrainingMode.RL.value and asked is not None:
            continue
        rows = np.flatnonzero(modes == mode)
        tokens, part = step.tokens_of(rows), step.take(rows)
        columns = part.columns
        own = token_losses(
            mode,
            {} if config is None else config.model_dump(),
            log_pi=columns["trainer_logprobs"],
            log_mu=columns["inference_logprobs"],
            advantages=columns["advantages"],
            trainable=columns["loss_mask"].astype(np.bool_),
            lengths=part.lengths.tolist(),
            teacher=columns.get("teacher_logprobs"),
        )
        found["token_loss"][tokens] = own.loss * factors[rows][part.owners]
        if mode == TrainingMode.SFT.value:
            continue
        for name, ratios in ratios_of(columns["trainer_logprobs"], columns["inference_logprobs"]).items():
            found[name][tokens] = ratios
        for name in MASKS:
            if (mask := getattr(own, name)) is not None:
                found[name][tokens] = mask
        if own.margin is not None:
            undecided[tokens] = own.margin < 64 * np.finfo(np.float32).eps
    return found, undecided


def _oracle_weights(step: ColumnBatch, config: LossConfig | None) -> NDArray[np.float64]:
    groups = step.columns.get("group_id", np.full(step.num_sequences, "", object)).tolist()
    reduction = "token" if config is None else config.reduction
    weights = loss_weights_of(reduction, num_trainable(step).tolist(), groups, modes_of(step).tolist())
    return np.array(weights)


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
    """Computes the weight of each record's tokens in the step's mean; all records have trainable tokens."""
    weights = np.ones(step.num_sequences, np.float32)
    if config is not None and config.reduction != "token":
        chosen = np.flatnonzero(modes_of(step) == TrainingMode.RL.value)
        groups = step.columns.get("group_id", np.full(step.num_sequences, "", object))[chosen].tolist()
        weights[chosen] = sequence_weights(config.reduction, num_trainable(step)[chosen], groups)
    return weights


def _loss(part: ColumnBatch, losses: Mapping[str, TokenLoss]) -> LossRecord:
    columns = {
        field.name: torch.from_numpy(np.ascontiguousarray(part.columns[field.name]))
        for field in TOKEN_FIELDS
        if field.name in part.columns and not (field.optional and np.isnan(part.columns[field.name]).all())
    }
    tokens = TokenTensors(part.lengths.tolist(), torch.empty(0), columns)  # no loss reads positions
    return losses[modes_of(part)[0]](LossInputs.of(tokens, columns["trainer_logprobs"]))
