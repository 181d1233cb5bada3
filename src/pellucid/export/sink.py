"""Sinks: each writes batches of records into one open file, as JSON lines or Parquet."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pellucid.export.arrow import open_writer, to_arrow
from pellucid.export.batch import ColumnBatch
from pellucid.export.jsonl import encode_lines
from pellucid.export.schema import Field


class RecordSink(Protocol):
    def write(self, batch: ColumnBatch) -> None: ...

    def close(self) -> None:
        """Completes the file."""

    def abandon(self) -> None:
        """Closes the file without completing it."""


_BUFFER_BYTES = 1 << 18
"""Size of the buffer for lines: one write per line would take a third longer."""


class JsonlRecords:
    def __init__(self, path: Path, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._file = path.open("wb", buffering=_BUFFER_BYTES)

    def write(self, batch: ColumnBatch) -> None:
        for line in encode_lines(batch, self._fields):
            self._file.write(line)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()


class ParquetSink:
    """A row group per batch."""

    def __init__(self, path: Path, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._file = path.open("wb")
        self._writer = open_writer(self._file, fields)

    def write(self, batch: ColumnBatch) -> None:
        if batch.num_sequences:
            self._writer.write_table(to_arrow(batch, self._fields))

    def close(self) -> None:
        self._writer.close()
        self._file.close()

    def abandon(self) -> None:
        """Closes the file without a footer, so that no reader takes it for a whole one."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError, ValueError):
            self._writer.close()
