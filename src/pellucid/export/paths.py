"""Where the export of a run lies, and who may write there.

    token_exports/step_7/rank_0.jsonl           a file per step and rank
    token_exports/step_7/summary.rank_0.json    what its tokens look like
    token_exports/step_7/STABLE                 every rank has written the step

With `path` the records lie elsewhere; a link in the step's folder says where, so that whoever knows the run
folder finds them:

    tokens.rank_0.jsonl                         `path = "tokens.jsonl"`: one file for all steps
    tokens.step_7.rank_0.parquet                `path = "tokens.parquet"`: Parquet files cannot be appended to
    token_exports/step_7/rank_0.link.json       {"path": "../../tokens.rank_0.jsonl", "start": 81, "stop": 95}

One run at a time writes to a place, and only the run that began it goes on with it.
"""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson

from pellucid.data.files import open_lock, read_whole, replace_file, try_lock
from pellucid.errors import ConfigError, DataError, DiskError

if TYPE_CHECKING:
    from pellucid.config import ExportFormat, TrainerRunConfig

FOLDER = "token_exports"
RUN_PARTS = ("configs", "ledger", "metrics", "rollouts")
"""Folders by which a run folder is known, besides `FOLDER`; none of them holds an export."""

MARKER = "STABLE"
LINK = ".link.json"
_UNKNOWN = "an unknown one"
_MAX_LOCK_BYTES = 1 << 16
_IN_STEP = re.compile(r"(?:summary\.)?rank_(\d+)(?:\.jsonl|\.parquet|\.json|\.link\.json)")


@dataclass(frozen=True, slots=True)
class ExportPaths:
    run_dir: Path
    suffix: str
    """`.jsonl` or `.parquet`."""

    explicit: Path | None = None
    """`trainer.experimental.token_export.path`, seen from the run folder."""

    @classmethod
    def of_run(cls, config: "TrainerRunConfig") -> "ExportPaths | None":
        """Returns the paths of a run's export; None for a run that exports nothing."""
        export = config.trainer.experimental.token_export
        return None if export is None else cls.at(config.output_dir, export.format, export.path)

    @classmethod
    def at(cls, run_dir: Path, format: "ExportFormat", path: Path | None) -> "ExportPaths":
        explicit = None if path is None else Path(os.path.normpath(run_dir / path))
        return cls(run_dir, f".{format}", explicit)

    def __str__(self) -> str:
        """Returns the place for messages: a folder, or file names with N and R for step and rank."""
        if self.explicit is None:
            return str(self.run_dir / FOLDER)
        return str(self._named("rank_R" if self.is_shared else "step_N.rank_R"))

    @property
    def is_shared(self) -> bool:
        """Whether the steps of a rank share one file."""
        return self.explicit is not None and self.suffix == ".jsonl"

    def file(self, step: int, rank: int) -> Path:
        if self.explicit is None:
            return self.folder(step) / f"rank_{rank}{self.suffix}"
        return self._named(f"rank_{rank}" if self.is_shared else f"step_{step}.rank_{rank}")

    def folder(self, step: int) -> Path:
        return self.run_dir / FOLDER / f"step_{step}"

    def marker(self, step: int) -> Path:
        return self.folder(step) / MARKER

    def summary(self, step: int, rank: int) -> Path:
        return self.folder(step) / f"summary.rank_{rank}.json"

    def link(self, step: int, rank: int, start: int, stop: int) -> None:
        """Says in the step's folder which bytes of `file(step, rank)` are the step's."""
        if self.explicit is None:
            return
        target, folder = self.file(step, rank).resolve(), self.folder(step).resolve()
        if target.is_relative_to(self.run_dir.resolve()):  # and stays where it is when the run is moved
            target = Path(os.path.relpath(target, folder))
        content = {"path": str(target), "start": start, "stop": stop}
        replace_file(folder / f"rank_{rank}{LINK}", orjson.dumps(content))

    def known(self) -> Iterator[tuple[int | None, int, Path]]:
        """(step, rank, path) of every file that is there, summaries and links too; no step where they share
        one."""
        for path in (self.run_dir / FOLDER).glob("step_*/*rank_*"):
            step = path.parent.name.removeprefix("step_")
            if (found := _IN_STEP.fullmatch(path.name)) and step.isdecimal():
                yield int(step), int(found[1]), path
        yield from self._known_elsewhere()

    def _known_elsewhere(self) -> Iterator[tuple[int | None, int, Path]]:
        if self.explicit is None:
            return
        stem = re.escape(self.explicit.stem)
        for path in self.explicit.parent.glob("*rank_*"):
            if found := re.fullmatch(rf"{stem}\.(?:step_(\d+)\.)?rank_(\d+){self.suffix}", path.name):
                yield (int(found[1]) if found[1] else None), int(found[2]), path

    def delete_partials(self) -> None:
        """Deletes hidden files that killed writers left, and links there, which a writer would follow."""
        places = [*(self.run_dir / FOLDER).glob("step_*/.rank_*.partial")]
        if self.explicit is not None:
            places += self.explicit.parent.glob(f".{glob.escape(self.explicit.stem)}.*rank_*.partial")
        for path in places:
            path.unlink(missing_ok=True)

    def check(self, *, resume: bool) -> None:
        """Raises ConfigError where this run cannot write, where another run writes, or has written what this
        one does not go on with."""
        owner = None
        with self._writing():
            if self._lock_path.exists():
                with open_lock(self._lock_path) as lock:
                    owner = self._owner(read_whole(self._lock_path, _MAX_LOCK_BYTES).decode(errors="replace"))
                    if not try_lock(lock):
                        raise ConfigError(self._taken(str(owner or _UNKNOWN)))
            is_own = owner == self.run_dir.resolve() or (resume and owner is None)
            if not is_own and (found := next(self._known_elsewhere(), None)) is not None:
                raise ConfigError(
                    f"trainer.experimental.token_export.path: {found[2]} holds the export of another run "
                    f"({owner or _UNKNOWN}); choose another path, or delete its files first"
                )

    def claim(self, *, resume: bool) -> IO[Any]:
        """Checks, and keeps every other run away from here until the file that is returned is closed."""
        self.check(resume=resume)
        with self._writing(), ExitStack() as opened:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(open_lock(self._lock_path))
            if not try_lock(lock):
                raise ConfigError(self._taken("which has just begun"))
            lock.truncate(0)
            lock.write(self._identity)
            lock.flush()
            opened.pop_all()
        return lock

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns an OSError, or a lock that is no file, into a ConfigError, unless the disk is full or
        read-only (`DiskError`)."""
        try:
            yield
        except (OSError, DataError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                reason = error.strerror or reason
                if error.errno in DiskError.REMEDIES:
                    raise
            key = f"output_dir = {self.run_dir}"
            if self.explicit is not None:
                key = f"trainer.experimental.token_export.path = {self.explicit}"
            raise ConfigError(
                f"{key}: the token export cannot be written there ({reason}); "
                "choose another path, or make its folder writable"
            ) from error

    @property
    def _identity(self) -> str:
        """The run folder, as the lock file names it: seen from there if that is within the run, so that the
        run may be moved."""
        run_dir, place = self.run_dir.resolve(), self._lock_path.parent.resolve()
        return os.path.relpath(run_dir, place) if place.is_relative_to(run_dir) else str(run_dir)

    def _owner(self, identity: str) -> Path | None:
        """Returns the run folder that a lock file names; None if it names none."""
        if "\0" in identity:
            raise DataError(f"{self._lock_path} is damaged: it names no run folder; delete it")
        return (self._lock_path.parent / identity).resolve() if identity else None

    @property
    def _lock_path(self) -> Path:
        """Locked while a run writes; afterwards it says which one did."""
        place = self.explicit or self.run_dir / FOLDER
        return place.with_name(f".{place.stem}.lock")

    def _taken(self, owner: str) -> str:
        return (
            f"trainer.experimental.token_export: another run ({owner}) is writing to {self}; give each run a "
            "path, or an output_dir, of its own"
        )

    def _named(self, which: str) -> Path:
        assert self.explicit is not None
        return self.explicit.with_name(f"{self.explicit.stem}.{which}{self.suffix}")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The records of one rank: a file, or a part of one."""

    path: Path
    summary: Path
    """Where a summary of them would be."""

    span: tuple[int, int] | None = None
    """The first byte and the one after the last; None: the whole file."""

    @classmethod
    def at(cls, path: Path) -> "RankFile":
        """Makes it from an export file, or from a link to one."""
        if not path.name.endswith(LINK):
            return cls(path, path.with_name(f"summary.{path.stem}.json"))
        try:
            link = orjson.loads(read_whole(path))
            target, span = path.parent / link["path"], (int(link["start"]), int(link["stop"]))
            if not 0 <= span[0] <= span[1]:
                raise ValueError(f"from byte {span[0]} to {span[1]}")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path} does not say where the records are: {error}") from error
        if not target.exists():
            raise DataError(f"{path} says that the records are in {target}, which is gone; put it back there")
        return cls(target, path.with_name(f"summary.{path.name.removesuffix(LINK)}.json"), span)


def partial_of(path: Path) -> Path:
    """The name of a file that is being written: hidden, so that no reader takes it for a whole one."""
    return path.with_name(f".{path.name}.partial")
