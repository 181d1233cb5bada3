"""The folder of a run: made, taken over, or refused, before the first process starts.

Only the command that owns the folder (`rl`, `sft`) prepares it. A folder is never shared by two runs,
and cleaning one deletes by name what a run writes: a file of anybody else survives.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console

from pellucid.config import RLConfig, RunConfig, TrainerRunConfig
from pellucid.data.files import open_lock, step_folders, try_lock
from pellucid.errors import ConfigError
from pellucid.export.paths import ExportPaths
from pellucid.guard import KEY_NAME
from pellucid.ledger import read_journal
from pellucid.orchestrator.progress import PROGRESS_FILE

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Held while a run goes on; the system lets go of it however the run ends."""

_ROOM_BYTES = 1 << 16
"""Free space that the folder needs for a run to start at all."""

WRITTEN_BY_A_RUN = (
    "configs",
    "logs",
    "metrics",
    "ledger",
    "rollouts",
    "batches",
    "weights",
    "checkpoints",
    "token_exports",
    "tensorboard",
    "profiles",
    "model",
    "page.html",
    KEY_NAME,
)

_RESULTS = ("metrics", "rollouts", "batches", "weights", "token_exports", "profiles", "model", "page.html")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes the folder, if need be, and keeps any other run out of it."""
    _make_writable(folder)
    with open_lock(folder / LOCK) as lock:
        if not try_lock(lock):
            raise ConfigError(
                f"output_dir = {folder} is in use by a run that is still going on; choose another folder, or "
                "stop that run first"
            )
        yield


def prepare(config: RunConfig) -> bool:
    """Whether the claimed `output_dir` holds a run that is to be resumed; else it is clean after this.

    Logs of a run that is resumed stay where they are: whoever rewinds it keeps them, see `keep_logs`.
    A start that failed before its first token is no run: what it wrote is deleted, but for its logs.
    """
    folder = config.output_dir
    used = [folder / name for name in WRITTEN_BY_A_RUN if _exists(folder / name)]
    begun = has_begun(folder)
    if begun and config.resume:
        _delete_partials(folder)
        return True
    if used and not begun and not config.clean_output_dir:
        keep_logs(folder)
        used = [path for path in used if path.name != "logs"]
    elif used and not config.clean_output_dir:
        names = ", ".join(path.name for path in used)
        raise ConfigError(
            f"output_dir = {folder} already holds a run ({names}); choose another folder, set resume to go "
            "on with that run, or clean_output_dir to delete what it wrote"
        )
    _keep_models(config, used)
    _delete_partials(folder)
    for path in used:
        _delete(path)
    if begun:
        logger.warning("deleted the earlier run in %s (clean_output_dir)", folder)
    return False


def has_begun(folder: Path) -> bool:
    """Whether a run in this folder has sampled, trained or written anything but settings, status and logs."""
    if any(_exists(folder / name) and _has_content(folder / name) for name in _RESULTS):
        return True
    if step_folders(folder / "checkpoints"):  # a stopped orchestrator leaves a snapshot there in any case
        return True
    journals = (folder / "ledger").glob("*.jsonl")
    return any(entry.counts for path in journals for entry in read_journal(path))


def _has_content(path: Path) -> bool:
    if not path.is_dir():
        return True
    return any(
        child.is_dir() or child.lstat().st_size
        for child in path.iterdir()
        if PROGRESS_FILE not in child.name  # half-written or whole: what an orchestrator does, not has done
    )


def settle_export(config: TrainerRunConfig, console: Console) -> None:
    """Says where the token export goes; raises ConfigError, and changes nothing, if that is another run's."""
    if (exports := ExportPaths.of_run(config)) is not None:
        exports.check(resume=config.resume)
        console.out(f"token exports go to {exports}", highlight=False)


def keep_logs(folder: Path) -> None:
    """Renames `logs/trainer.log` to `trainer.1.log`, or to the next number that is free."""
    for path in sorted((folder / "logs").glob("*.log")):
        if path.suffixes == [".log"]:
            number = next(n for n in count(1) if not path.with_suffix(f".{n}.log").exists())
            path.rename(path.with_suffix(f".{number}.log"))


def _delete_partials(folder: Path) -> None:
    """Deletes the hidden, half-written files of killed processes: they are of no use and may be large."""
    for name in WRITTEN_BY_A_RUN:
        for path in (*folder.glob(f".{name}.partial-*"), *(folder / name).glob(".step_*.partial-*")):
            _delete(path)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"output_dir = {folder} is not a folder; choose another path") from error
    except OSError as error:
        raise ConfigError(
            f"output_dir = {folder} cannot be written to ({error.strerror}); choose a folder that can, or "
            "free some space"
        ) from error


def _keep_models(config: RunConfig, doomed: list[Path]) -> None:
    """Refuses to delete the model to train, or its teacher, where an earlier run left it in this folder."""
    models = {"model.name": (config.model.name, "the model to train")}
    if isinstance(config, RLConfig) and (teacher := config.orchestrator.teacher) is not None:
        models["orchestrator.teacher.model"] = (teacher.model or "", "the teacher")
    for key, (name, what) in models.items():
        for path in doomed:
            if name and Path(name).resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    f"clean_output_dir would delete {key} = {name}, {what}; choose another output_dir"
                )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _delete(path: Path) -> None:
    """Deletes a file or folder; a folder that is a mount point is only emptied."""
    if path.is_mount():
        for each in path.iterdir():
            _delete(each)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
