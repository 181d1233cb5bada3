"""Encodes the records of one rank, step by step: under a hidden name until the step is complete.

`StepWriter` does it here, `WriterProcess` (`process.py`) in a process of its own.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from pellucid.data.files import append_file, replace_file
from pellucid.export.batch import ColumnBatch
from pellucid.export.paths import ExportPaths, partial_of
from pellucid.export.schema import Field
from pellucid.export.sink import JsonlRecords, ParquetSink, RecordSink
from pellucid.export.summary import StepSummary


class Writer(Protocol):
    """Each may raise an OSError; `abandon` never."""

    def write(self, step: int, batch: ColumnBatch) -> None:
        """Writes a part of a step; the first part opens its file."""

    def complete(self, step: int) -> None:
        """Gives the step's file its name, even if it has no record, and writes its summary."""

    def abandon(self) -> None:
        """Lets go of a step that is not complete: its file keeps its hidden name."""


@dataclass
class StepWriter:
    paths: ExportPaths
    rank: int
    fields: tuple[Field, ...]
    _sink: RecordSink | None = None
    _summary: StepSummary = field(default_factory=StepSummary)

    def write(self, step: int, batch: ColumnBatch) -> None:
        self._summary.add(batch)
        self._open(step).write(batch)

    def complete(self, step: int) -> None:
        self._open(step).close()
        target = self.paths.file(step, self.rank)
        start = target.stat().st_size if self.paths.is_shared and target.exists() else 0
        if self.paths.is_shared:
            append_file(target, partial_of(target))
            partial_of(target).unlink()
        else:
            partial_of(target).rename(target)
        self.paths.link(step, self.rank, start, target.stat().st_size)
        summary = orjson.dumps(self._summary.as_dict(), option=orjson.OPT_SERIALIZE_NUMPY)
        replace_file(self.paths.summary(step, self.rank), summary)
        self._sink, self._summary = None, StepSummary()

    def abandon(self) -> None:
        if self._sink is not None:
            self._sink.abandon()
        self._sink, self._summary = None, StepSummary()

    def _open(self, step: int) -> RecordSink:
        if self._sink is None:
            path = partial_of(self.paths.file(step, self.rank))
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = JsonlRecords if self.paths.suffix == ".jsonl" else ParquetSink
            self._sink = kind(path, self.fields)
        return self._sink


def take_back(paths: ExportPaths, step: int, rank: int) -> None:
    """Deletes what was written of a step: half a step is of no use, and its space may be needed."""
    target = paths.file(step, rank)
    with suppress(OSError):
        partial_of(target).unlink(missing_ok=True)
        if not paths.is_shared:
            target.unlink(missing_ok=True)
