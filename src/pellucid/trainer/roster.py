"""How runs find the trainer that they share, and join it: `runs/NAME/` below its folder.

    run.toml + STABLE     a run that wants to be trained, with its own configuration
    alive                 locked by the run's process as long as it lives
    LEAVE                 the run wants to go, after a checkpoint
    OUTCOME               how it ended, written by the trainer: done, left, evicted or stopped, and why

The run writes all but `OUTCOME`, and deletes the folder once it has read that; if the run died, the trainer
deletes it. The trainer keeps a lock on `.serving` as long as it lives.
"""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO

from pellucid.config import TrainerRunConfig
from pellucid.config.base import to_toml
from pellucid.data.files import open_lock, read_whole, replace_file, try_lock
from pellucid.data.model_folder import everywhere
from pellucid.ending import DISK_SILENCE_S, say
from pellucid.errors import ConfigError, DataError, ProcessError
from pellucid.trainer.batches import Stopped, StopRequest
from pellucid.transport import is_stable, publish_folder

logger = logging.getLogger(__name__)

_CONFIG = "run.toml"
_ALIVE = "alive"
_LEAVE = "LEAVE"
_OUTCOME = "OUTCOME"
_SERVING = ".serving"
_MAX_OUTCOME_BYTES = 1 << 20
_POLL_S = 0.05
_REMIND_S = 30.0


class RunOutcome(Enum):
    DONE = "done"
    LEFT = "left"
    EVICTED = "evicted"
    STOPPED = "stopped"


class Roster:
    def __init__(self, trainer_dir: Path) -> None:
        self._folder = trainer_dir
        self._runs = trainer_dir / "runs"

    # The trainer's side.

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Locks the folder for this trainer; raises ConfigError if another trainer holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open_lock(self._folder / _SERVING) as lock:
            if not try_lock(lock):
                raise ConfigError(
                    f"output_dir = {self._folder} is in use by a trainer that is still going on; choose "
                    "another folder, or stop that trainer first"
                )
            yield

    def waiting(self) -> list[str]:
        """Names the runs that want to be trained, sorted."""
        return [
            name
            for name in self._names()
            if not (self._runs / name / _OUTCOME).exists() and not self.is_leaving(name)
        ]

    def is_leaving(self, name: str) -> bool:
        """Returns whether the run asked to leave, or its process is gone."""
        folder = self._runs / name
        return (folder / _LEAVE).exists() or not _is_locked(folder / _ALIVE)

    def config_path(self, name: str) -> Path:
        return self._runs / name / _CONFIG

    def say(self, name: str, outcome: RunOutcome, reason: str = "") -> None:
        """Writes how a run ended; deletes its folder instead if the run's process is gone."""
        folder = self._runs / name
        with suppress(FileNotFoundError):
            if _is_locked(folder / _ALIVE):
                replace_file(folder / _OUTCOME, f"{outcome.value}\n{reason}".encode())
            else:
                shutil.rmtree(folder)

    def sweep(self) -> None:
        """Deletes the folders of runs whose process has died."""
        for name in self._names():
            if not _is_locked(self._runs / name / _ALIVE):
                shutil.rmtree(self._runs / name, ignore_errors=True)

    # The run's side.

    @contextmanager
    def joined(self, name: str, config: str) -> Iterator[None]:
        """Keeps a run on the roster inside the `with`; raises ConfigError if a living run has its name."""
        folder = self._runs / name
        if _is_locked(folder / _ALIVE):
            raise ConfigError(
                f"a run {name!r} is being trained by {self._folder}; choose another run_id or output_dir"
            )
        locks: list[IO[str]] = []

        def write(partial: Path) -> None:
            locks.append((partial / _ALIVE).open("a"))
            try_lock(locks[0])
            (partial / _CONFIG).write_text(config, encoding="utf-8")

        publish_folder(folder, write)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            locks[0].close()

    def leave(self, name: str) -> None:
        (self._runs / name / _LEAVE).touch()

    def has_trainer(self) -> bool:
        return _is_locked(self._folder / _SERVING)

    def outcome(self, name: str) -> tuple[RunOutcome, str] | None:
        """Reads how the run ended, and why; None if the trainer has not written it yet."""
        path = self._runs / name / _OUTCOME
        try:
            word, _, reason = read_whole(path, _MAX_OUTCOME_BYTES).decode(errors="replace").partition("\n")
            return RunOutcome(word), reason
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} does not say what became of the run: {error}") from error

    def _names(self) -> list[str]:
        return sorted(folder.name for folder in self._runs.glob("[!.]*") if is_stable(folder))


def _is_locked(path: Path) -> bool:
    """Returns whether a living process holds a lock on the file; False for anything but a file."""
    if not path.is_file():
        return False
    try:
        with path.open("r+") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def join_trainer(config: TrainerRunConfig) -> None:
    """Has a run trained by the trainer that `trainer.join` names, and returns once it is done.

    A run waits until that trainer starts. Raises ProcessError, with the reason, if the run ended earlier or
    the trainer disappears.
    """
    folder = config.trainer.join
    assert folder is not None
    model = config.model.model_copy(update={"name": everywhere(config.model.name)})
    absolute = {"output_dir": config.output_dir.resolve(), "run_id": config.run_name, "model": model}
    roster, name = Roster(folder), config.run_name
    stop, stopped = StopRequest(), None
    was_there, reminded = False, -_REMIND_S
    with stop.listening(), roster.joined(name, to_toml(config.model_copy(update=absolute))):
        while (ended := roster.outcome(name)) is None:
            try:
                stop.check()
            except Stopped as request:
                if stopped is None:
                    roster.leave(name)
                    say(f"waiting for the trainer in {folder} to save the run", silence_s=DISK_SILENCE_S)
                stopped = request
            is_there = roster.has_trainer()
            # A trainer writes the outcome before it goes.
            if was_there and not is_there and roster.outcome(name) is None:
                raise ProcessError(
                    f"the trainer in {folder} is gone; start it again, then go on with --resume"
                )
            if not is_there and time.monotonic() - reminded > _REMIND_S:
                reminded = time.monotonic()
                logger.warning("no trainer serves runs in %s yet; waiting for one", folder)
            was_there = is_there
            if not is_there and stopped is not None:
                break
            time.sleep(_POLL_S)
    if stopped is not None:
        raise SystemExit(128 + stopped.signal)
    assert ended is not None
    outcome, reason = ended
    if outcome is not RunOutcome.DONE:
        raise ProcessError(f"run {name} was {outcome.value} by the trainer in {folder}: {reason}")
