"""Publishes weights in a thread beside training; writes checkpoints in one, or while training waits.

    save ──> copy of the state ──> [ thread: write, publish ] ──> settle: batches that it covers are released
                  │
                  └──> the next steps train meanwhile

At most one checkpoint is written at a time: the next one, and the end of a run, wait for it. It is published
only once it is complete. `settle` raises the errors of the thread, in the thread that trains. Weights are
published in the same way, one version after the other.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import nn
from torch.optim import Optimizer

from pellucid.checkpoint import Progress, publish_checkpoint
from pellucid.checkpoint.state import State, take_state, write_state
from pellucid.config.trainer import CkptConfig
from pellucid.data.spans import SpanLog
from pellucid.ending import DISK_SILENCE_S, working
from pellucid.trainer.parallel import Ranks
from pellucid.transport.weights import publish_version


def take_random_state(generators: Sequence[torch.Generator]) -> list[bytes]:
    return [generator.get_state().numpy().tobytes() for generator in generators]


def restore_random_state(generators: Sequence[torch.Generator], progress: Progress, process: int) -> None:
    """Sets the generators of one process to what a checkpoint says of it.

    With another number of processes there is no such state: all go on with that of the main one. A GPU's is
    left alone if the checkpoint was written on a CPU.
    """
    states = progress.random_states or [[progress.random_state]]
    known = states[process] if process < len(states) else states[0]
    for generator, state in zip(generators, known, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class CheckpointSaver:
    """Every process has one, and calls it at the same steps."""

    def __init__(self, run_dir: Path, config: CkptConfig, ranks: Ranks) -> None:
        self._run_dir = run_dir
        self._config = config
        # The thread needs a process group of its own: its messages must not mix with those of training.
        self._ranks = ranks.apart() if config.asynchronous else ranks
        self._writing: Future[int] | None = None
        self._step = 0

    def save(self, progress: Progress, model: nn.Module, optimizer: Optimizer) -> None:
        self._step = progress.step
        with self._announced():
            writing = Future[int]()
            arguments = writing, progress, take_state(model, optimizer, copy=self._config.asynchronous)
            if self._config.asynchronous:
                Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
            else:
                self._write(*arguments)
        self._writing = writing

    def settle(self, *, wait: bool) -> int | None:
        """Returns the first step whose batch may be needed again; None if no checkpoint was published."""
        if wait:
            self._wait()
        if self._writing is None or not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        """Waits for a checkpoint that is being written, unless it needs other processes: they may be gone."""
        if self._ranks.group is None:
            self._wait()

    def _wait(self) -> None:
        if self._writing is not None and not self._writing.done():
            with self._announced():
                futures.wait([self._writing])

    def _announced(self) -> AbstractContextManager[None]:
        """Context manager: the launcher knows that a checkpoint is written, and gives it time."""
        return working(
            f"writing the checkpoint of step {self._step}",
            at_stake="that checkpoint: the steps since the one before are trained again",
            silence_s=DISK_SILENCE_S,
        )

    def _write(self, writing: Future[int], progress: Progress, state: State) -> None:
        def write_together(folder: Path | None) -> None:
            """Writes into the folder of the main process, in every process."""
            shared = self._ranks.share(lambda: folder)
            assert shared is not None
            write_state(state, shared, self._ranks.group)

        needed_from = 0
        try:
            if self._ranks.is_main:
                keep_last = self._config.keep_last
                needed_from = publish_checkpoint(self._run_dir, progress, write_together, keep_last=keep_last)
            else:
                write_together(None)
        except BaseException as error:  # raised where it is waited for
            writing.set_exception(error)
        else:
            writing.set_result(needed_from)


class WeightsPublisher:
    """Publishes the policy versions of a run, in order; only that of the main process is used."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        spans: SpanLog | None = None,
        is_read: Callable[[int], bool] = lambda version: False,
        deltas: bool = False,
    ) -> None:
        self._publish = partial(publish_version, run_dir, keep=keep, is_read=is_read, deltas=deltas)
        self._spans = spans
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._writing: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def publish(self, version: int, write: Callable[[Path], None]) -> None:
        """Starts to write a version, once the one before it is complete."""
        self.settle()
        self._writing = self._thread.submit(self._write, version, write)

    def _write(self, version: int, write: Callable[[Path], None]) -> None:
        with nullcontext() if self._spans is None else self._spans.timed("write", version):
            self._publish(version, write)

    def settle(self, *, wait: bool = True) -> None:
        """Raises the error that a version ended with; `wait`s until it is complete."""
        if wait:
            self._wait()
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Waits for a version that is being written, whatever becomes of it."""
        self._wait()
        self._thread.shutdown()

    def _wait(self) -> None:
        """Waits for the thread; a signal may interrupt that, and the next call waits again."""
        if self._writing is not None and self.is_writing:
            with working("publishing the weights", silence_s=DISK_SILENCE_S):
                futures.wait([self._writing])
