"""A Parquet export: reads the footer and the keys; columns of a row group are decoded when asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from pellucid.errors import DataError
from pellucid.export.arrow import from_arrow
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.optional import require
from pellucid.export.schema import BY_NAME, KEY
from pellucid.export.source import Key, Report


class ParquetSource:
    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self._pq = require("pyarrow.parquet", "a .parquet export")
        self._lock = Lock()
        self._group = -1
        """The row group that was read last."""

        self._lengths: Values | None = None
        self._found: dict[str, Values] = {}
        self._places: list[tuple[int, int]] = []
        """Row group, and row within it."""

        self.keys: list[Key] = []
        self.num_damaged = 0
        """Row groups that were left out."""

        self._metadata: Any = None
        self.columns: tuple[str, ...] = ()
        try:
            with self._file() as file:
                self._metadata, self.columns = file.metadata, tuple(file.schema_arrow.names)
                if "token_ids" not in self.columns:
                    raise DataError(
                        f"{path}: expected one row per sequence with a list column token_ids, got the "
                        f"columns {sorted(self.columns)[:8]}"
                    )
                self._find_rows(file, report)
        except require("pyarrow", "a .parquet export").ArrowInvalid as error:
            if self._metadata is not None:
                raise
            report(f"{path} is cut short (still being written, or its writer died); skipped: {error}")

    @contextmanager
    def _file(self) -> Iterator[Any]:
        file = self._pq.ParquetFile(
            self.path, metadata=self._metadata, memory_map=True, page_checksum_verification=True
        )
        with file:
            yield file

    def _find_rows(self, file: Any, report: Report) -> None:
        named = [name for name in KEY if name in self.columns]
        for group in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group, columns=named, use_threads=False)
            except OSError as error:
                self.num_damaged += 1
                report(f"{self.path}, row group {group} is damaged; skipped: {error}")
                continue
            columns = [table.column(name).to_pylist() if name in named else [0] * num_rows for name in KEY]
            self.keys += zip(*columns, strict=True)
            self._places += [(group, row) for row in range(num_rows)]

    def names(self, row: int) -> Sequence[str]:
        return self.columns

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        known = [name for name in names if name in self.columns]
        if not any(name not in BY_NAME or BY_NAME[name].per_token for name in known):
            known.append("loss_mask" if "loss_mask" in self.columns else "token_ids")  # for the lengths
        places = [self._places[row] for row in rows]
        parts = [
            self._read(group, known).take([row for _, row in members])
            for group, members in groupby(places, key=lambda place: place[0])
        ]
        return ColumnBatch.concat(parts) if parts else ColumnBatch(np.zeros(0, np.int64), {})

    def _read(self, group: int, names: Sequence[str]) -> ColumnBatch:
        """Columns of a row group; they stay until another one is read."""
        with self._lock:
            if self._group != group:
                self._group, self._lengths, self._found = group, None, {}
            if missing := [name for name in names if name not in self._found]:
                with self._file() as file:
                    table = file.read_row_group(group, columns=missing, use_threads=False)
                try:
                    part = from_arrow(table, self._lengths)
                except DataError as error:
                    raise DataError(f"{self.path}, row group {group}: {error}") from error
                self._lengths = part.lengths
                self._found |= part.columns
            assert self._lengths is not None
            return ColumnBatch(self._lengths, {name: self._found[name] for name in names})
