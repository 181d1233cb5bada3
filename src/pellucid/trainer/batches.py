"""Where a run's batches come from (an orchestrator, a data set, or random tokens), and what ends the wait.

On a signal, a trainer ends between two steps, where it can write a checkpoint:

SIGTERM, SIGINT or SIGHUP while a step trains     noted; raised at the next `check`
                          while it waits          raised at once (`interruptible`)
                          a second time           ends the process as it would any other

A signal that is ignored, as `nohup` does with SIGHUP, stays ignored.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from signal import Signals
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pellucid.config import TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.images import read_image_shape
from pellucid.model.load import experts_of, vocab_size
from pellucid.transport import Batch, BatchReceiver, open_receiver

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class BatchSource(Protocol):
    def next(self, step: int) -> Batch:
        """Blocks until the samples of `step` arrive, and returns them."""
        raise AssertionError(f"the batch of step {step} is received by the main process")

    def is_there(self, step: int) -> bool:
        """Returns whether `next` would not wait."""
        return True

    def expect(self, step: int) -> None:
        """Tells whoever sends the batches, if it asks, that the run goes on with this step."""
        return None

    def finish_answering(self, within_s: float) -> None:
        """Waits until whoever sends the batches knows that, at most so long."""
        return None

    def release_before(self, step: int) -> None:
        """Lets batches of earlier steps be deleted: a checkpoint covers them."""
        return None


class NoBatches(BatchSource):
    """Source of a process that receives nothing itself: the main process sends it every batch."""


class OrchestratorBatches(BatchSource):
    def __init__(self, receiver: BatchReceiver) -> None:
        self._receiver = receiver

    def next(self, step: int) -> Batch:
        return self._receiver.receive(step)

    def is_there(self, step: int) -> bool:
        return self._receiver.has(step)

    def expect(self, step: int) -> None:
        self._receiver.expect(step)

    def finish_answering(self, within_s: float) -> None:
        self._receiver.finish_answering(within_s)

    def release_before(self, step: int) -> None:
        self._receiver.release_before(step)


def open_batches(config: TrainerRunConfig) -> BatchReceiver:
    """Opens the receiver of a run's batches; it refuses samples that the model of the run cannot train on."""
    return open_receiver(
        config.transport,
        config.output_dir,
        config.run_name,
        vocab_size=vocab_size(config.model),
        experts=experts_of(config.model) if config.trainer.enable_router_replay else None,
        images=read_image_shape(config.model.name),
    )


class DatasetBatches(BatchSource):
    """Consecutive examples of an endless row of epochs, each in its own order.

    A batch depends on seed and step alone, so that a resumed run goes on as if it had never stopped.

    5 examples, batches of 3:   epoch 0  3 0 4 1 2   epoch 1  1 4 2 0 3
                                step 0   3 0 4       step 1   1 2 1      step 2   4 2 0
    """

    def __init__(self, samples: Sequence[TrainingSample], batch_size: int, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def next(self, step: int) -> Batch:
        samples = [self._samples[index] for index in self.indices(step)]
        return Batch("", step, TokenTable.from_samples(samples))

    def indices(self, step: int) -> list[int]:
        """Chooses the examples of a step."""
        chosen: list[int] = []
        position = step * self._batch_size
        while (missing := self._batch_size - len(chosen)) > 0:
            epoch, offset = divmod(position + len(chosen), len(self._samples))
            chosen += self._epoch(epoch)[offset : offset + missing].tolist()
        return chosen

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._samples))


@dataclass(frozen=True)
class FakeBatches(BatchSource):
    """Samples of random tokens, of full length, half of it prompt. A batch depends on seed and step alone."""

    batch_size: int
    length: int
    vocab_size: int
    run_id: str
    seed: int

    def next(self, step: int) -> Batch:
        generator, num_prompt = np.random.default_rng([self.seed, step]), self.length // 2
        samples = []
        for index in range(self.batch_size):
            token_ids = generator.integers(0, self.vocab_size, self.length)
            samples.append(
                TrainingSample.from_turn(
                    token_ids[:num_prompt],
                    token_ids[num_prompt:],
                    np.full(self.length - num_prompt, -np.log(self.vocab_size)),
                    env_name="fake",
                    run_id=self.run_id,
                    advantage=1.0 if index % 2 else -1.0,
                )
            )
        return Batch(self.run_id, step, TokenTable.from_samples(samples))


class Stopped(BaseException):
    """Raised when a signal asks training to stop. It is no error: only the entries of a trainer catch it."""

    def __init__(self, number: Signals) -> None:
        super().__init__(number)
        self.signal = number

    def __str__(self) -> str:
        return self.signal.name


class StopRequest:
    def __init__(self) -> None:
        self._received: Signals | None = None
        self._waiting = False
        self._tell: Callable[[], None] = lambda: None
        self._heeded: list[Signals] = []

    @contextmanager
    def listening(self, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Context manager: handles signals inside, in the main thread; in any other thread it does nothing.

        The signal handler calls `tell`, which tells the launcher what the trainer finishes first.
        """
        self._tell = tell
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before: dict[Signals, Any] = {number: signal.signal(number, self._note) for number in self._heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        if self._received is not None:
            raise Stopped(self._received)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self._waiting = True
        try:
            self.check()
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = Signals(number)
        self._tell()
        for each in self._heeded:
            signal.signal(each, signal.SIG_DFL)
        if self._waiting:
            self._waiting = False
            self.check()
