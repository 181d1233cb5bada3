"""Inputs and record of a loss, token by token, and the weight of each token in the step's mean.

π  probability under the trainer's weights      A  advantage
μ  probability under the weights that sampled   m  trainable

log_importance_ratio  ℓ = log π − log μ         mismatch_kl  r − ℓ − 1
importance_ratio      r = exp ℓ                 prob_delta   π − μ
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.config import Reduction
from pellucid.data.schema import SCHEMA
from pellucid.data.tensors import TokenTensors, to_device


def only(mask: Tensor, values: Tensor, fill: float = 0.0) -> Tensor:
    """Keeps the values where a mask is true; `torch.where` takes three times as long on a CPU."""
    return values.masked_fill(~mask, fill)


@dataclass(frozen=True, slots=True)
class Ratios:
    """Mismatch of the trainer's policy with the one that sampled, for every token; without gradient."""

    log_importance_ratio: Tensor
    importance_ratio: Tensor
    mismatch_kl: Tensor
    prob_delta: Tensor

    @classmethod
    def of(cls, trainer_logprobs: Tensor, inference_logprobs: Tensor) -> "Ratios":
        with torch.no_grad():
            log_ratio = trainer_logprobs - inference_logprobs
            return cls(
                log_importance_ratio=log_ratio,
                importance_ratio=log_ratio.exp(),
                # expm1 keeps the digits that r − ℓ − 1 cancels when ℓ is small.
                mismatch_kl=torch.expm1(log_ratio) - log_ratio,
                prob_delta=trainer_logprobs.exp() - inference_logprobs.exp(),
            )


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One value per token of a packed micro batch.

    On tokens that are not trainable, each column is set to its fill (0; NaN for the teacher's logprobs): the
    batch may hold anything there (an environment masks out tokens without a logprob). So neither the loss
    nor, through `where`, the gradient can depend on them.

        loss_mask            no      yes     yes
        inference_logprobs   nan     -0.5    -2.0     as received
                             0       -0.5    -2.0     as a loss sees them
    """

    trainer_logprobs: Tensor
    """Logprobs under the trainer's weights, with gradient."""

    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    teacher_logprobs: Tensor | None
    """Logprobs under the teacher, NaN where a token has none; None without a teacher."""

    ratios: Ratios
    """Ratios of all tokens, for the record; NaN is possible on tokens that are not trainable."""

    lengths: Sequence[int]
    """Lengths of the packed sequences, in tokens."""

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Every other column that the schema declares for losses, where the batch has it."""

    def __post_init__(self) -> None:
        for name in ("trainer_logprobs", "inference_logprobs", "advantages", "teacher_logprobs"):
            values: Tensor | None = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, self._trainable(name, values))
        others = {name: self._trainable(name, values) for name, values in self.columns.items()}
        object.__setattr__(self, "columns", others)

    def _trainable(self, name: str, values: Tensor) -> Tensor:
        return only(self.loss_mask, values, SCHEMA[name].fill)

    @classmethod
    def of(cls, tokens: TokenTensors, trainer_logprobs: Tensor) -> "LossInputs":
        """Takes the columns that the schema declares for losses."""
        read = {name: values for name, values in tokens.columns.items() if SCHEMA[name].read_by == "loss"}
        return cls(
            trainer_logprobs=trainer_logprobs,
            inference_logprobs=read.pop("inference_logprobs"),
            advantages=read.pop("advantages"),
            loss_mask=tokens["loss_mask"],
            teacher_logprobs=read.pop("teacher_logprobs", None),
            ratios=Ratios.of(trainer_logprobs, tokens["inference_logprobs"]),
            lengths=tokens.lengths,
            columns=read,
        )

    def mean_per_sequence(self, values: Tensor) -> Tensor:
        """Gives each token the mean of `values` over the trainable tokens of its sequence; 0 without any."""
        num_sequences = len(self.lengths)
        (owner,) = to_device([np.repeat(np.arange(num_sequences), self.lengths)], values.device)
        zeros = values.new_zeros(num_sequences)
        sums = zeros.index_add(0, owner, only(self.loss_mask, values))
        counts = zeros.index_add(0, owner, self.loss_mask.to(values.dtype))
        return (sums / counts.clamp(min=1))[owner]

    def log_ratio(self, where: Tensor | None = None) -> Tensor:
        """Computes ℓ with gradient; 0 outside the trainable tokens (or `where`), where it might overflow."""
        log_ratio = self.trainer_logprobs - self.inference_logprobs
        return log_ratio if where is None else only(where, log_ratio)


@dataclass(frozen=True, slots=True)
class LossRecord:
    """Loss and decisions for each token. None: the loss makes no such decision."""

    token_loss: Tensor
    """Loss of each token, with gradient; 0 where a token is not trainable."""

    ratios: Ratios | None
    is_masked: Tensor | None = None
    """Whether a trainable token is outside the trust region, so that its policy-gradient term is left out."""

    is_masked_high: Tensor | None = None
    is_masked_low: Tensor | None = None

    def columns(self) -> dict[str, Tensor | None]:
        """Returns every value by the name under which it is exported."""
        ratios = {each.name: getattr(self.ratios, each.name, None) for each in fields(Ratios)}
        return ratios | {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "ratios"
        }

    def weighted(self, weights: Tensor | None) -> "LossRecord":
        """Multiplies each token's loss by its weight in the mean."""
        return self if weights is None else replace(self, token_loss=self.token_loss * weights)

    def within(self, inputs: LossInputs) -> "LossRecord":
        """Clears losses and masks of tokens that are not trainable, which a custom loss may have set."""
        decisions = self.is_masked, self.is_masked_high, self.is_masked_low
        masks = (None if each is None else each & inputs.loss_mask for each in decisions)
        return LossRecord(only(inputs.loss_mask, self.token_loss), inputs.ratios, *masks)


def sequence_weights(
    reduction: Reduction, num_trainable: NDArray[np.int64], groups: Sequence[str]
) -> NDArray[np.float32]:
    """Weighs the trainable tokens of each sequence for a mean over tokens, over sequences, or over groups.

    The denominator is always the number of trainable tokens of the step, so the mean weight over them is 1:

        sequences of 1 and 3 trainable tokens     mean over sequences = Σ w·loss / 4
        weights   4/(2·1) = 2    4/(2·3) = 2/3    2·1 + 2/3·3 = 4

    The arguments are those of the whole batch, before it is packed, so that neither packing nor ranks can
    change the weights. A sequence without a group ("") is a group of its own.
    """
    if reduction == "token":
        return np.ones(len(num_trainable), np.float32)
    numbers: dict[str | int, int] = {}
    names = [row if reduction == "sequence" else group or row for row, group in enumerate(groups)]
    units = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    per_unit = np.bincount(units, weights=num_trainable)
    shares = num_trainable.sum() / (max(1, np.count_nonzero(per_unit)) * np.maximum(per_unit, 1))
    weights: NDArray[np.float32] = shares[units].astype(np.float32)
    return weights
