"""Writes checkpoints, while training waits or in a thread beside it.

    save ──> copy of the state ──> [ thread: write, publish ] ──> settle: batches that it covers are released
                  │
                  └──> the next steps train meanwhile

At most one checkpoint is written at a time: the next one, and the end of a run, wait for it. It is published
only once it is complete. `settle` raises the errors of the thread, in the thread that trains.
"""

from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread

from torch import nn
from torch.optim import Optimizer

from pellucid.checkpoint import Progress, publish_checkpoint
from pellucid.checkpoint.state import State, take_state, write_state
from pellucid.config.trainer import CkptConfig
from pellucid.ending import DISK_SILENCE_S, working
from pellucid.trainer.parallel import Ranks


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
