"""Where the trainer's batches come from: an orchestrator, or a data set."""

from collections.abc import Iterator
from typing import Protocol

from pellucid.data import TokenTable, TrainingSample
from pellucid.transport import BatchReceiver


class BatchSource(Protocol):
    def next(self, step: int) -> TokenTable:
        """Blocks until the samples of this step are there."""

    def release(self, step: int) -> None:
        """The step is trained and saved; its batch is no longer needed."""


class OrchestratorBatches:
    def __init__(self, receiver: BatchReceiver) -> None:
        self._receiver = receiver

    def next(self, step: int) -> TokenTable:
        return self._receiver.receive(step).table

    def release(self, step: int) -> None:
        self._receiver.release(step)


class DatasetBatches:
    """Consecutive samples of an endless stream."""

    def __init__(self, samples: Iterator[TrainingSample], batch_size: int) -> None:
        self._samples = samples
        self._batch_size = batch_size

    def next(self, step: int) -> TokenTable:
        return TokenTable.from_samples([next(self._samples) for _ in range(self._batch_size)])

    def release(self, step: int) -> None:
        """A data set stays where it is."""
