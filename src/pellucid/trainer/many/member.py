"""One of the runs that share a model: the batch that it trains, and how much of it is trained."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pellucid.data import TokenTable
from pellucid.trainer.loop import accumulate
from pellucid.trainer.observer import StepObserver
from pellucid.trainer.run import Run
from pellucid.trainer.step import StepBatch
from pellucid.trainer.trained import OneAdapter


@dataclass
class Member:
    name: str
    run: Run
    adapter: OneAdapter
    """The adapter slot of the model that this run trains."""

    step: int
    """Index of the step that is being trained, or whose batch is awaited."""

    batch: StepBatch | None = None
    observer: StepObserver | None = None
    num_taken: int = 0
    num_micro_batches: int = 0

    def __post_init__(self) -> None:
        self._waiting = ExitStack()
        self._wait()

    def _wait(self) -> None:
        self._waiting.enter_context(self.run.waiting())

    @property
    def is_done(self) -> bool:
        return self.step == self.run.max_steps

    @property
    def waiting(self) -> Sequence[int]:
        """Lengths of the samples of its batch that are still to be trained."""
        return [] if self.batch is None else self.batch.table.lengths[self.num_taken :].tolist()

    def receive(self, table: TokenTable) -> None:
        self.batch = self.run.pack(self.step, table)
        self.observer = self.run.observer(self.batch)
        self.num_taken = self.num_micro_batches = 0

    def train(self, num_samples: int) -> bool:
        """Adds the gradient of the next samples of the batch; returns whether they were the last."""
        assert self.batch is not None
        self._waiting.close()
        stop = self.num_taken + num_samples
        part = self.run.part(self.batch, self.num_taken, stop, self.num_micro_batches)
        accumulate(self.run, part, self.observer)
        self.num_taken = stop
        self.num_micro_batches += len(part.packed.steps)
        if stop == self.batch.table.num_sequences:
            return True
        self._wait()
        return False

    def finish_step(self) -> None:
        assert self.observer is not None
        update = self.run.update(self.observer)
        self.run.publish(self.step)
        self.run.finish(self.step, self.observer, update)
        self.batch = self.observer = None
        self.step += 1
        self._wait()

    def forget_gradients(self) -> None:
        """Clears the gradients of an unfinished step: the next run in this slot starts without them."""
        self.adapter.module.zero_grad(set_to_none=True)
