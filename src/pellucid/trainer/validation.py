"""The loss on examples that are never trained on.

    validation/loss          mean of −log π over the trainable tokens of all validation examples
    validation/perplexity    its exponential
    validation/tokens        the tokens that it is the mean of

The record of step n has the values of the weights after that step, every `interval` steps and at the last
one, so that the last record holds for the model that is saved. `validation/initial_loss`, in the record of
step 0, is the loss before any training. Measuring computes no gradient and draws no random number: a run
trains the same with it and without.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pellucid.model import TokenOutput
from pellucid.trainer.step import LoadedMicroBatch, StepBatch

Forward = Callable[[LoadedMicroBatch], TokenOutput]
Gather = Callable[[float], list[float]]

LOSS = "validation/loss"


class Validation:
    def __init__(
        self,
        policy: nn.Module,
        forward: Forward,
        batches: Sequence[StepBatch],
        *,
        interval: int,
        max_steps: int,
        gather: Gather,
    ) -> None:
        self._gather = gather
        self._policy = policy
        self._forward = forward
        self._batches = batches
        self._interval = interval
        self._max_steps = max_steps
        self._initial_loss: float | None = None

    def begin(self) -> None:
        """Measures the weights that training starts from."""
        self._initial_loss = self.measure()[LOSS]

    def report(self, step: int) -> dict[str, float]:
        """Measures after a step if validation is due, and returns its metrics; else returns none."""
        num_trained = step + 1
        due = num_trained % self._interval == 0 or num_trained == self._max_steps
        report = self.measure() if due else {}
        if step == 0 and self._initial_loss is not None:
            report["validation/initial_loss"] = self._initial_loss
        return report

    def measure(self) -> dict[str, float]:
        total, num_tokens = torch.zeros((), dtype=torch.float64), 0
        with torch.no_grad(), _evaluating(self._policy):
            for batch in self._batches:
                num_tokens += batch.packed.num_trainable
                for micro_batch in batch.micro_batches:
                    logprobs = self._forward(micro_batch).logprobs
                    total -= logprobs[micro_batch.tokens["loss_mask"]].double().sum().cpu()
        loss = sum(self._gather(float(total))) / num_tokens
        return {
            LOSS: loss,
            "validation/perplexity": float(torch.tensor(loss).exp()),
            "validation/tokens": num_tokens,
        }


@contextmanager
def _evaluating(policy: nn.Module) -> Iterator[None]:
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)
