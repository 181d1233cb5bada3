"""The folder of a run: made, taken over, or refused, before the first process starts.

Only the command that owns the folder (`rl`, `sft`) prepares it. Two runs never share a folder. Cleaning one
deletes by name what a run writes: a file of anybody else survives.

The folder of a run that died, or was stopped, is brought back to one consistent point:

    checkpoint   the newest one that is intact; the trainer goes on with its step
    next_batch   the first batch from there on that is missing or damaged; the orchestrator goes on with it

Each part takes back its own files, here as when it is resumed alone: the trainer by `checkpoint.take_back`,
the orchestrator by `orchestrator.snapshot`. This module takes back what several parts share: metrics, and
exports of steps that will be sampled anew. A rewind that is interrupted can be run again.
"""

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from pellucid.checkpoint import newest_intact, take_back
from pellucid.config import (
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    TrainerRunConfig,
)
from pellucid.data.files import OUTCOME, open_lock, replace_file, require_own, step_folders, try_lock
from pellucid.data.plain import encodable
from pellucid.errors import ConfigError, DataError, LedgerError
from pellucid.export.paths import ExportPaths
from pellucid.guard import KEY_NAME
from pellucid.launch.console import make_console
from pellucid.ledger import Stage, State, read_journal, reconcile, settle_engines
from pellucid.ledger.journal import journals_of
from pellucid.ledger.settings import Change, changed_settings
from pellucid.metrics import drop_metrics
from pellucid.orchestrator.records import PROGRESS_FILE
from pellucid.orchestrator.snapshot import (
    check_max_steps,
    has_trainers_part,
    read_snapshot,
    settle_orchestrator,
)
from pellucid.transport import retract_steps

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Held while a run goes on; the system lets go of it however the run ends."""

_ROOM_BYTES = 1 << 16
"""Free space that the folder needs for a run to start at all."""

_NO_FOLDER = "output_dir = {} is not a folder; choose another path"
_WEIGHTS = ("weights", "weights_offered", "weights_cache")
_RESULTS = ("metrics", "rollouts", "batches", *_WEIGHTS, "token_exports", "profiles", "model", "page.html")
WRITTEN_BY_A_RUN = ("configs", "logs", "ledger", "checkpoints", "spans", "tensorboard", KEY_NAME, *_RESULTS)


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


@contextmanager
def noting_outcome(folder: Path) -> Iterator[None]:
    """Context manager: writes down how the run inside ended, for whoever looks at the folder later."""
    _write_outcome(folder, "")
    outcome = "interrupted"
    try:
        yield
        outcome = "finished"
    except Exception as error:
        outcome = f"failed\n{error}"
        raise
    finally:
        _write_outcome(folder, outcome)


def _write_outcome(folder: Path, outcome: str) -> None:
    """Replaces what is said of the end; does nothing on a full disk, or where a link is in the way."""
    with suppress(OSError, DataError):
        require_own(folder / OUTCOME)
        replace_file(folder / OUTCOME, encodable(outcome).encode())


def prepare(config: RunConfig) -> bool:
    """Returns whether the claimed `output_dir` holds a run that is to be resumed; else cleans the folder.

    A start that failed before its first token is no run: what it wrote is deleted, but for its logs.
    """
    folder = config.output_dir
    begun = has_begun(folder)
    if begun and config.resume:
        _delete_partials(folder)
        return True
    doomed = _doomed(config, begun=begun)
    if not config.clean_output_dir:
        keep_logs(folder)
    _delete_partials(folder)
    for path in doomed:
        _delete(path)
    if begun:
        logger.warning("deleted the earlier run in %s (clean_output_dir)", folder)
    return False


def check_folder(config: RunConfig) -> list[Change]:
    """Raises ConfigError where the run could not take over its folder; changes nothing.

    Returns the settings that a resumed run changes.
    """
    folder = config.output_dir
    if _exists(folder) and not folder.is_dir():
        raise ConfigError(_NO_FOLDER.format(folder))
    begun = has_begun(folder)
    if begun and config.resume:
        return _changes(config)
    _doomed(config, begun=begun)
    return []


def _doomed(config: RunConfig, *, begun: bool) -> list[Path]:
    """Returns what an earlier run, or a start that failed, left behind and this run deletes.

    Raises ConfigError if the earlier run, or a model in its folder, is not to be deleted.
    """
    folder = config.output_dir
    used = [folder / name for name in WRITTEN_BY_A_RUN if _exists(folder / name)]
    if begun and not config.clean_output_dir:
        names = ", ".join(path.name for path in used)
        raise ConfigError(
            f"output_dir = {folder} already holds a run ({names}); choose another folder, set resume to go "
            "on with that run, or clean_output_dir to delete what it wrote"
        )
    if not config.clean_output_dir:
        used = [path for path in used if path.name != "logs"]
    _keep_models(config, used)
    return used


def has_begun(folder: Path) -> bool:
    """Whether a run in this folder has sampled, trained or written anything but settings, status and logs."""
    if any(_exists(folder / name) and _has_content(folder / name) for name in _RESULTS):
        return True
    if step_folders(folder / "checkpoints"):  # a stopped orchestrator leaves a snapshot there in any case
        return True
    journals = (path for stage in Stage for path in journals_of(folder / "ledger", stage))
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
        raise ConfigError(_NO_FOLDER.format(folder)) from error
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


@dataclass(frozen=True, slots=True)
class ResumePoint:
    checkpoint: int
    next_batch: int
    num_lost: int = 0
    """Tokens that were sampled and are gone."""

    num_rolled_back: int = 0
    """Tokens that were trained in steps that are discarded."""

    def __str__(self) -> str:
        """`resuming at step 50; 7 batches are trained from disk first; 312 sampled tokens were lost`."""
        parts = [f"resuming at step {self.checkpoint}"]
        if replayed := self.next_batch - self.checkpoint:
            parts.append(
                f"{replayed} {'batches are' if replayed > 1 else 'batch is'} trained from disk first"
            )
        if self.num_lost:
            parts.append(f"{self.num_lost:,} sampled tokens were lost")
        if self.num_rolled_back:
            parts.append(f"{self.num_rolled_back:,} trained tokens are rolled back")
        return "; ".join(parts)


Config = TypeVar("Config", bound=RunConfig)


def take_over(
    config: Config, rewind: Callable[[Config, Sequence[Change]], ResumePoint], console: Console
) -> tuple[Config, int]:
    """Returns the configuration of a run in its claimed folder, and the first step to train.

    `resume` is true from here on only if the folder holds a run, which is rewound then; its logs are kept.
    Settings that a resumed run must not have are refused before any file of the run is touched.
    """
    changes = check_folder(config)
    config = config.model_copy(update={"resume": prepare(config)})
    if not config.resume:
        return config, 0
    point = rewind(config, changes)
    keep_logs(config.output_dir)
    console.out(str(point), highlight=False)
    for change in changes:
        # Batches that are trained from disk were formed under the earlier settings of the orchestrator.
        shapes_batches = change.key.startswith(("orchestrator.", "inference.", "max_async_level"))
        since = point.next_batch if shapes_batches else point.checkpoint
        console.out(change.line(since), highlight=False)
    return config, point.checkpoint


def _changes(config: RunConfig) -> list[Change]:
    """Finds what a resumed run sets otherwise than before, each key once, though parts of it share some."""
    parts: dict[str, RunConfig] = {"sft": config}
    other = "rl"
    if isinstance(config, RLConfig):
        other = "sft"
        parts = {
            "orchestrator": config.part(OrchestratorRunConfig),
            "trainer": config.part(TrainerRunConfig),
        }
    if (config.output_dir / "configs" / f"{other}.toml").exists():
        raise ConfigError(
            f"output_dir = {config.output_dir} holds a run of `pellucid {other}`, which another command "
            "cannot resume; choose another folder"
        )
    changes = [change for name, part in parts.items() for change in changed_settings(part, name)]
    return list({change.key: change for change in changes}.values())


def run_rewind(config: RLConfig) -> None:
    """Rewinds the folder and starts nothing: for runs whose parts are started on their own."""
    with claimed(config.output_dir):
        _require_trainers_part(config.output_dir)
        config, _ = take_over(config.model_copy(update={"resume": True}), rewind_rl, make_console())
    if not config.resume:
        raise ConfigError(f"output_dir = {config.output_dir} holds no run that could be resumed")


def _require_trainers_part(folder: Path) -> None:
    """Raises ConfigError in the folder of an orchestrator whose trainer has one of its own: all batches would
    look lost."""
    if read_snapshot(folder) is not None and not has_trainers_part(folder):
        raise ConfigError(
            f"output_dir = {folder} has the orchestrator's part of a run and nothing of its trainer, which "
            "has a folder elsewhere; start each part with --resume instead"
        )


def rewind_sft(config: RunConfig, changes: Sequence[Change] = ()) -> ResumePoint:
    progress = newest_intact(config.output_dir)
    checkpoint = progress.step if progress else 0
    check_max_steps(config, checkpoint, "trained")
    drop_metrics(config.output_dir / "metrics" / "trainer.jsonl", checkpoint)
    return ResumePoint(checkpoint, checkpoint)


def rewind_rl(
    config: TrainerRunConfig | OrchestratorRunConfig, changes: Sequence[Change] = ()
) -> ResumePoint:
    """Brings the folder back; `changes` are the settings that are others from here on.

    Files that several parts write or read can be put right only while none of them runs.
    """
    folder = config.output_dir
    before = _given_up(folder)
    progress = newest_intact(folder)
    checkpoint = progress.step if progress else 0
    next_batch = settle_orchestrator(config, changes, checkpoint=checkpoint).batches_sent
    settle_engines(folder / "ledger")
    take_back(folder, progress)
    retract_steps(folder / "token_exports", next_batch)
    first_steps = {"trainer": checkpoint, "orchestrator": next_batch, "inference": checkpoint}
    for name, step in {**first_steps, "eval": checkpoint + 1}.items():
        drop_metrics(folder / "metrics" / f"{name}.jsonl", step)
    given_up = _given_up(folder) - before
    return ResumePoint(checkpoint, next_batch, given_up[State.LOST.value], given_up[State.ROLLED_BACK.value])


def _given_up(folder: Path) -> Counter[str]:
    """Counts the tokens that died with their process, and those of discarded steps, as far as is known."""
    try:
        return sum(reconcile(folder / "ledger").states.values(), Counter[str]())
    except LedgerError:  # there are no books yet
        return Counter()
