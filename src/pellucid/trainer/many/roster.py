"""How runs find the trainer that they share: `runs/NAME/` below its folder.

    run.toml + STABLE     a run that wants to be trained, with its own configuration
    alive                 locked by the run's process as long as it lives
    LEAVE                 the run wants to go, after a checkpoint
    OUTCOME               how it ended, written by the trainer: done, left, evicted or stopped, and why

The run writes all but `OUTCOME`, and deletes the folder once it has read that; if the run died, the trainer
deletes it. The trainer keeps a lock on `.serving` as long as it lives.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO

from pellucid.data.files import open_lock, read_whole, replace_file, try_lock
from pellucid.errors import ConfigError, DataError
from pellucid.transport import is_stable, publish_folder

_CONFIG = "run.toml"
_ALIVE = "alive"
_LEAVE = "LEAVE"
_OUTCOME = "OUTCOME"
_SERVING = ".serving"
_MAX_OUTCOME_BYTES = 1 << 20


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
        return [name for name in self._names() if not self._has_outcome(name) and not self.is_leaving(name)]

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

    def _has_outcome(self, name: str) -> bool:
        return (self._runs / name / _OUTCOME).exists()

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
