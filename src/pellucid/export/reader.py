"""Reads token exports back: one record per sequence, ordered by (step, rank, export_sequence_idx).

    outputs/demo/                       a run folder            finished steps only
    outputs/demo/token_exports/         its exports             finished steps only
    outputs/demo/token_exports/step_7/  one step                read even without its STABLE marker
    any/where/rank_0.jsonl              one file, or .parquet

Records that lie elsewhere (`trainer.experimental.token_export.path`) are found by the links of their steps.

Records carry the columns of the export format, fewer where the writer had fewer. The older form, a list of
objects under `tokens`, comes out in the same columns. A shape that is neither is an error with file and
line; so is an input without records. What is torn or damaged is reported and left out.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pellucid.data.files import read_whole, require_file, step_number
from pellucid.errors import DataError
from pellucid.export.jsonl import JsonlSource
from pellucid.export.parquet import ParquetSource
from pellucid.export.paths import FOLDER, LINK, MARKER, RankFile
from pellucid.export.records import Records, RecordSource, Wanted, read_columns
from pellucid.export.summary import NEEDED, StepSummary

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
_STEPS_KEPT_OPEN = 64


def open(path: Path | str, *, report: Callable[[str], object] = log.warning) -> "Export":
    """Opens the exports below `path`. `report` gets each problem once; `problems` keeps them."""
    return Export(Path(path), report)


class Export:
    """The exports below a path; files are opened when their step is first asked for.

    Open a running run again to see its new steps: that reads nothing but folder names.
    """

    def __init__(self, path: Path, report: Callable[[str], object] = log.warning) -> None:
        self.path = path
        self.problems: list[str] = []
        """Messages about torn or damaged parts that were left out of the files opened so far."""

        self._report = report
        self._folders = _step_folders(path)
        self._sources = lru_cache(_STEPS_KEPT_OPEN)(self._open_step)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be read, ascending."""
        if self._folders is not None:
            return tuple(self._folders)
        return tuple(sorted({key[0] for source in self._sources(None) for key in source.keys}))

    def step(self, number: int) -> Records:
        return self.records({number})

    def records(self, steps: Collection[int] | None = None, **wanted: Wanted) -> Records:
        """All records, or those of some steps; `wanted` as in `Records.where`."""
        entries: list[tuple[RecordSource, int]] = []
        for step in self._folders if self._folders is not None else (None,):
            if step is None or steps is None or step in steps:
                found = [
                    (key, number, row, source)
                    for number, source in enumerate(self._sources(step))
                    for row, key in enumerate(source.keys)
                    if steps is None or key[0] in steps
                ]
                entries += [(source, row) for *_, row, source in sorted(found, key=lambda entry: entry[:3])]
        records = Records(entries)
        return records.where(**wanted) if wanted else records

    def summary(self, step: int) -> StepSummary:
        """Returns the summary of a step; makes it from the records where none is written, or an old one."""
        total = StepSummary()
        folder = None if self._folders is None else self._folders.get(step)
        paths = [] if folder is None else [file.summary for file in _rank_files(folder)]
        written = [summary for path in paths if (summary := self._written_summary(path)) is not None]
        if paths and len(written) == len(paths):
            for summary in written:
                total.merge(summary)
        else:
            for source, rows in self.step(step).files():
                total.add(read_columns(source, rows, NEEDED))
        return total

    def _written_summary(self, path: Path) -> StepSummary | None:
        """None where there is none, or an older one; one that is damaged is reported, too."""
        try:
            return StepSummary.from_json(read_whole(path)) if path.exists() else None
        except (DataError, OSError) as error:
            self._note(f"{path} is damaged ({error}); its numbers are counted anew from the records")
            return None

    def _open_step(self, step: int | None) -> list[RecordSource]:
        if step is None:
            files = [RankFile.at(self.path)] if self.path.is_file() else _rank_files(self.path)
        else:
            assert self._folders is not None
            files = _rank_files(self._folders[step])
        return [_open_source(file, self._note) for file in files]

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
            self._report(problem)


def read_records(
    path: Path,
    steps: Collection[int] | None = None,
    *,
    report: Callable[[str], object] = log.warning,
) -> Iterator[dict[str, Any]]:
    """Yields the records below `path` as plain lists and numbers, one by one; at least one."""
    records = open(path, report=report).records(steps)
    if not records:
        which = "" if steps is None else f" of the steps {sorted(steps)}"
        raise DataError(f"{path} holds no token-export records{which}")
    for record in records:
        yield record.as_dict()


def _open_source(file: RankFile, report: Callable[[str], object]) -> RecordSource:
    require_file(file.path)
    if file.path.suffix == ".parquet":
        return ParquetSource(file.path, report)
    return JsonlSource(file.path, report, file.span)


def _step_folders(path: Path) -> dict[int, Path] | None:
    """Returns the finished steps of a folder, in order; None for a step folder or a file."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path}: expected a .jsonl or .parquet file, got {path.suffix or 'no suffix'}")
        return None
    if not path.is_dir():
        raise DataError(
            f"{path} does not exist; give a run, token_exports or step folder, or a .jsonl or .parquet file"
        )
    exports = path / FOLDER if (path / FOLDER).is_dir() else path
    numbers = sorted(_step_numbers(exports))
    if not numbers:
        _rank_files(path)
        return None
    finished = {
        number: exports / f"step_{number}"
        for number in numbers
        if os.path.exists(f"{exports}/step_{number}/{MARKER}")  # of a long run these are thousands
    }
    if not finished:
        raise DataError(
            f"{exports} has {len(numbers)} steps, none of them finished (no {MARKER} marker); "
            f"name a step folder such as {exports / f'step_{numbers[0]}'} to read it as it is"
        )
    return finished


def _step_numbers(exports: Path) -> Iterator[int]:
    with os.scandir(exports) as entries:
        for entry in entries:
            if (number := step_number(entry.name)) is not None and entry.is_dir():
                yield number


def _rank_files(folder: Path) -> list[RankFile]:
    files = sorted(path for suffix in (*SUFFIXES, LINK) for path in folder.glob(f"*{suffix}"))
    if not files:
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder} holds no .jsonl or .parquet token export; expected rank_R.jsonl, found {present}"
        )
    return [RankFile.at(path) for path in files]
