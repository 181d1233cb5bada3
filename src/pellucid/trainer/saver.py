"""Writes checkpoints, while training waits or in a thread beside it.

    save ──> copy of the state ──> [ thread: write, publish ] ──> settle: batches that it covers are released
                  │
                  └──> the next steps train meanwhile

At most one checkpoint is written at a time: the next one, and the end of a run, wait for it. It is published
only once it is complete. `settle` raises the errors of the thread, in the thread that trains.
"""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from torch import nn
from torch.optim import Optimizer

from pellucid.checkpoint import Progress, publish_checkpoint
from pellucid.checkpoint.state import stage_state, write_staged, write_state
from pellucid.config.trainer import CkptConfig
from pellucid.trainer.parallel import Ranks


class CheckpointSaver:
    """Every process has one, and calls it at the same steps."""

    def __init__(self, run_dir: Path, config: CkptConfig, ranks: Ranks) -> None:
        self._run_dir = run_dir
        self._config = config
        # The thread needs a process group of its own: its messages must not mix with those of training.
        self._ranks = ranks.apart() if config.asynchronous else ranks
        self._writing: Future[int] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether there is a checkpoint to `settle`."""
        return self._writing is not None

    def save(self, progress: Progress, model: nn.Module, optimizer: Optimizer) -> None:
        group = self._ranks.group
        if self._config.asynchronous:
            state = stage_state(model, optimizer)
            arguments = Future[int](), progress, lambda to: write_staged(state, to, group)
            Thread(target=self._run, args=arguments, name="checkpoint", daemon=True).start()
        else:
            arguments = Future[int](), progress, lambda to: write_state(model, optimizer, to, group)
            self._run(*arguments)
        self._writing = arguments[0]

    def settle(self, *, wait: bool) -> int | None:
        """Returns the first step whose batch may be needed again; None if no checkpoint was published."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        """Waits for a checkpoint that is being written, unless it needs other processes: they may be gone."""
        if self._writing is not None and self._ranks.group is None:
            futures.wait([self._writing])

    def _run(self, writing: Future[int], progress: Progress, write: Callable[[Path], None]) -> None:
        try:
            writing.set_result(self._publish(progress, write))
        except BaseException as error:  # raised where it is waited for
            writing.set_exception(error)

    def _publish(self, progress: Progress, write: Callable[[Path], None]) -> int:
        def write_together(folder: Path | None) -> None:
            """Writes into the folder of the main process, in every process."""
            shared = self._ranks.share(lambda: folder)
            assert shared is not None
            write(shared)

        if self._ranks.is_main:
            return publish_checkpoint(
                self._run_dir, progress, write_together, keep_last=self._config.keep_last
            )
        write_together(None)
        return 0
