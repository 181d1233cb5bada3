"""A Parquet export: reads the footer and the keys; columns of a row group are decoded when asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from pellucid.errors import DataError
from pellucid.export.arrow import check_schema, from_arrow
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.optional import require
from pellucid.export.schema import BY_NAME, KEY
from pellucid.export.shapes import check_values
from pellucid.export.source import Key, Report

MAX_VALUES = 1 << 27
"""Values of a column in a row group, at most; pellucid writes one micro batch per row group."""


class ParquetSource:
    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self._pq = require("pyarrow.parquet", "a .parquet export")
        self._lock = Lock()
        self._group = -1
        """The row group that was read last."""

        self._lengths: Values | None = None
        self._found: dict[str, Values] = {}
        self._num_rows: dict[int, int] = {}
        self._places: list[tuple[int, int]] = []
        """Row group of each record, and its row within the group."""

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
                check_schema(path, file.schema_arrow)
                self._find_rows(file, report)
        except require("pyarrow", "a .parquet export").ArrowException as error:
            if self._metadata is not None:
                raise DataError(f"{path} is damaged: {error}; copy it again") from error
            report(f"{path} is cut short (still being written, or its writer died); skipped: {error}")

    @contextmanager
    def _file(self) -> Iterator[Any]:
        file = self._pq.ParquetFile(
            self.path,
            metadata=self._metadata,
            memory_map=True,
            pre_buffer=False,  # what is mapped is there: buffers of it only take time
            page_checksum_verification=True,
        )
        with file:
            yield file

    def _find_rows(self, file: Any, report: Report) -> None:
        groups = range(file.metadata.num_row_groups)
        self._num_rows = {group: file.metadata.row_group(group).num_rows for group in groups}
        for group in groups:
            self._check_counts(group, file.metadata.row_group(group), file.schema)
        if file.metadata.num_rows != sum(self._num_rows.values()):
            raise self._contradiction(f"{file.metadata.num_rows:,} rows", f"{sum(self._num_rows.values()):,}")
        if not groups:
            return
        try:
            self._add_rows(file, groups)
        except OSError:  # then which of them is it?
            for group in groups:
                try:
                    self._add_rows(file, [group])
                except OSError as error:
                    self.num_damaged += 1
                    report(f"{self.path}, row group {group} is damaged; skipped: {error}")

    def _check_counts(self, group: int, about: Any, schema: Any) -> None:
        """Raises DataError if the footer contradicts itself, or tells of more than can be read."""
        for index in range(about.num_columns):
            num_values = about.column(index).num_values
            if num_values > MAX_VALUES:  # they may be packed into a few bytes
                raise DataError(
                    f"{self.path}, row group {group} unpacks to columns of {num_values:,} values; at most "
                    f"{MAX_VALUES:,} are read at once: write it with smaller row groups"
                )
            is_list = schema.column(index).max_repetition_level > 0  # an empty one counts as a value
            if not (0 <= about.num_rows <= num_values if is_list else about.num_rows == num_values):
                name = about.column(index).path_in_schema
                claim = f"{about.num_rows:,} rows in row group {group}"
                raise self._contradiction(claim, f"{num_values:,} values of {name}")

    def _contradiction(self, claim: str, found: str) -> DataError:
        return DataError(
            f"{self.path} is damaged: its footer tells of {claim}, and of {found}; copy it again"
        )

    def _add_rows(self, file: Any, groups: Sequence[int]) -> None:
        named = [name for name in KEY if name in self.columns]
        table = file.read_row_groups(groups, columns=named or ["token_ids"], use_threads=False)
        num_rows = self._check_rows(groups, table)
        columns = [table.column(name).to_pylist() if name in named else [0] * num_rows for name in KEY]
        self.keys += zip(*columns, strict=True)
        self._places += [(group, row) for group in groups for row in range(self._num_rows[group])]

    def _check_rows(self, groups: Sequence[int], table: Any) -> int:
        """Returns the number of rows of these row groups; raises if footer and table disagree."""
        num_rows = sum(self._num_rows[group] for group in groups)
        if table.num_rows != num_rows:
            raise DataError(
                f"{self.path} is damaged: its footer tells of {num_rows:,} rows, but it has "
                f"{table.num_rows:,}; copy it again"
            )
        return num_rows

    def names(self, row: int) -> Sequence[str]:
        return self.columns

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        known = [name for name in names if name in self.columns]
        if not any(name not in BY_NAME or BY_NAME[name].per_token for name in known):
            known.append("loss_mask" if "loss_mask" in self.columns else "token_ids")  # for the lengths
        groups = sorted({self._places[row][0] for row in rows})
        if not groups:
            return ColumnBatch(np.zeros(0, np.int64), {})
        batch = self._read(groups[0], known) if len(groups) == 1 else self._read_all(groups, known)
        starts = dict(zip(groups, np.cumsum([0, *(self._num_rows[group] for group in groups)]), strict=False))
        wanted = [starts[group] + row for group, row in (self._places[row] for row in rows)]
        return batch if wanted == list(range(batch.num_sequences)) else batch.take(wanted)

    def _read_all(self, groups: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        table = self._table(groups, names)
        return self._columns_of(table, "row groups", groups)

    def _table(self, groups: Sequence[int], names: Sequence[str]) -> Any:
        try:
            with self._file() as file:
                table = file.read_row_groups(groups, columns=names, use_threads=False)
        except (OSError, require("pyarrow", "a .parquet export").ArrowException) as error:
            where = ", ".join(map(str, groups))
            raise DataError(f"{self.path}, row group {where} is damaged: {error}; copy it again") from error
        self._check_rows(groups, table)
        return table

    def _read(self, group: int, names: Sequence[str]) -> ColumnBatch:
        """Columns of a row group; they stay until another one is read."""
        with self._lock:
            if self._group != group:
                self._group, self._lengths, self._found = group, None, {}
            if missing := [name for name in names if name not in self._found]:
                part = self._columns_of(self._table([group], missing), "row group", group, self._lengths)
                self._lengths = part.lengths
                self._found |= part.columns
            assert self._lengths is not None
            return ColumnBatch(self._lengths, {name: self._found[name] for name in names})

    def _columns_of(self, table: Any, what: str, where: object, lengths: Values | None = None) -> ColumnBatch:
        try:
            batch = from_arrow(table, lengths)
            check_values(batch.columns)
            return batch
        except (DataError, ValueError) as error:
            raise DataError(f"{self.path}, {what} {where}: {error}") from error
