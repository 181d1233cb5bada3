"""Where the trainer's batches come from: an orchestrator, or a data set."""

from collections.abc import Sequence
from typing import Protocol

from pellucid.data import TokenTable, TrainingSample
from pellucid.trainer.sft_data import ShuffledBatches
from pellucid.transport import BatchReceiver


class BatchSource(Protocol):
    def next(self, step: int) -> TokenTable:
        """Blocks until the samples of this step are there."""

    def release_before(self, step: int) -> None:
        """Earlier steps are trained and saved; their batches are no longer needed."""


class OrchestratorBatches:
    def __init__(self, receiver: BatchReceiver) -> None:
        self._receiver = receiver

    def next(self, step: int) -> TokenTable:
        return self._receiver.receive(step).table

    def release_before(self, step: int) -> None:
        self._receiver.release_before(step)


class DatasetBatches:
    """A data set, shuffled, epoch after epoch; a batch depends on seed and step alone."""

    def __init__(self, samples: Sequence[TrainingSample], batch_size: int, seed: int) -> None:
        self._samples = samples
        self._order = ShuffledBatches(len(samples), batch_size, seed)

    def next(self, step: int) -> TokenTable:
        return TokenTable.from_samples([self._samples[index] for index in self._order.batch(step)])

    def release_before(self, step: int) -> None:
        """A data set stays where it is."""
