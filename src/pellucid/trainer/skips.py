"""Skipped steps, whose loss or gradient is not finite: their cause, and how many there are in a row.

step           4       5         6         7        max_skipped_steps = 3
loss           0.1     nan       0.2       nan
weights        move    stay      move      stay
in a row       0       1         0         1
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from pellucid.errors import DataError
from pellucid.trainer.optimizer import Update
from pellucid.trainer.step import LoadedMicroBatch, LossResult


class FiniteWatch:
    """Finds the first token of a step whose loss is not finite; only `cause` reads back from the device."""

    def __init__(self) -> None:
        self._first: list[torch.Tensor] = []
        """Row per micro batch: whether it has a bad token, its index, loss, logprobs and advantage."""

        self._sequences: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        """Lengths, environments and rollouts of the sequences, per micro batch."""

    def add(self, micro_batch: LoadedMicroBatch, result: LossResult) -> None:
        losses, inputs = result.record.token_loss.detach(), result.inputs
        is_bad = ~losses.isfinite()
        token = is_bad.int().argmax().view(1)
        numbers = (losses, inputs.trainer_logprobs.detach(), inputs.inference_logprobs, inputs.advantages)
        # `each[token]` would synchronise with the device.
        found = [is_bad.any().view(1), token, *(each.index_select(0, token) for each in numbers)]
        self._first.append(torch.cat([each.double() for each in found]))
        table = micro_batch.table
        self._sequences.append((table.lengths, table["env_name"], table["rollout_id"]))

    def cause(self) -> str | None:
        """Describes the first bad token and its numbers; None if all losses are finite."""
        if not self._first:
            return None
        for found, sequences in zip(torch.stack(self._first).tolist(), self._sequences, strict=True):
            if found[0]:
                return _token(int(found[1]), found[2:], *sequences)
        return None


def _token(
    index: int, numbers: Sequence[float], lengths: NDArray[Any], envs: NDArray[Any], rollouts: NDArray[Any]
) -> str:
    row = int((lengths.cumsum() > index).argmax())
    token = index - int(lengths[:row].sum())
    loss, trainer, inference, advantage = numbers
    whose = f"rollout {rollouts[row]!r}" if rollouts[row] else f"sequence {row} of its micro batch"
    return (
        f"the loss of token {token} of {whose}, environment {envs[row]!r}, is {loss:g} (trainer logprob "
        f"{trainer:g}, inference logprob {inference:g}, advantage {advantage:g})"
    )


def cause_of(update: Update, tokens: Sequence[str | None], parameters: Sequence[str | None]) -> str:
    """Picks the first known cause: a token's loss by rank, else a parameter's gradient by process, else the
    norm."""
    for cause in tokens:
        if cause is not None:
            return cause
    for name in parameters:
        if name is not None:
            return f"every token's loss is finite, but the gradient of {name} is not"
    return f"the norm of the gradient is {update.grad_norm:g}"


class Skips:
    """Counts the steps of a run that were skipped in a row."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max = max_in_a_row
        self._in_a_row = 0
        self._cause = ""

    def add(self, cause: str | None) -> None:
        """Counts one more step; `cause` is None if it was not skipped."""
        self._in_a_row = 0 if cause is None else self._in_a_row + 1
        self._cause = cause or ""

    @property
    def is_over(self) -> bool:
        return self._in_a_row >= self._max

    def error(self, step: int, output_dir: Path, *, is_exported: bool) -> DataError:
        """Makes the error that ends a run after `step`, once its checkpoint is written."""
        first = step - self._in_a_row + 1
        which = f"step {step} was" if first == step else f"steps {first} to {step} were"
        look = f"look at their tokens with `pellucid view {output_dir}`"
        if not is_exported:
            look = "export their tokens with --trainer.experimental.token-export"
        return DataError(
            f"{which} skipped, as many in a row as trainer.max_skipped_steps = {self._max} allows: "
            f"{self._cause}. The weights are those of policy version {first}, and a checkpoint holds them: "
            f"{look}; then --resume goes on with the next batch. Lower trainer.optim.lr if the "
            "policy has diverged"
        )
