"""Records as Arrow tables and Parquet files: one row per sequence, per-token columns as lists.

In a file, zstd compresses the columns. Floats are split by byte (their exponents compress, their mantissas do
not); what has few values is a dictionary. The reader looks at the footer and the keys, and decodes columns of
a row group when it is asked for them. pyarrow is imported when it is first needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from pellucid.data.rows import Rows
from pellucid.data.schema import FIELD_BY_NAME, Column
from pellucid.data.table import TokenTable, Values
from pellucid.errors import ConfigError, DataError
from pellucid.export.jsonl import KEY, NAMES, Report, check_values

MAX_VALUES = 1 << 27
"""Values of a column in a row group, at most; pellucid writes one micro batch per row group."""

_SPAN = ("role", "start", "stop")


def require(package: str, what: str) -> Any:
    """Returns the module, or an error that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        raise ConfigError(
            f"{what} needs {root}, which is not installed; `pip install 'pellucid[export]'`"
        ) from error


def arrow_type(field: Column) -> Any:
    pa = require("pyarrow", "Parquet")
    if field.name == "role_spans":
        span = pa.struct([("role", pa.string()), ("start", pa.int64()), ("stop", pa.int64())])
        return pa.list_(span)
    value = pa.string() if field.dtype is str else pa.from_numpy_dtype(np.dtype(field.dtype))
    return pa.list_(value) if field.per_token else value


def check_schema(path: Path, schema: Any) -> None:
    """Raises DataError unless the columns that readers know are of the kinds that they know."""
    pa = require("pyarrow", "Parquet")

    def is_number(kind: Any) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))

    for name, kind in zip(schema.names, schema.types, strict=True):
        field = FIELD_BY_NAME.get(name)
        if field is None or field.name == "role_spans" or pa.types.is_null(kind):
            continue
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if field.per_token:
            fits = is_list and (is_number(kind.value_type) or pa.types.is_null(kind.value_type))
        elif field.dtype is str:
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            is_text = pa.types.is_string(plain) or pa.types.is_large_string(plain)
            fits = is_text or (name not in NAMES and is_number(plain))
        else:
            fits = is_number(kind)
        if not fits:
            raise DataError(f"{path}: expected {name} to be of type {arrow_type(field)}, got {kind}")


def to_arrow(batch: TokenTable, fields: Sequence[Column]) -> Any:
    pa = require("pyarrow", "Parquet")
    offsets = pa.array(batch.token_offsets.astype(np.int32))
    arrays, types = [], []
    for field in fields:
        kind, values = arrow_type(field), batch[field.name]
        if field.per_token:
            arrays.append(pa.ListArray.from_arrays(offsets, _numbers(pa, values, kind.value_type)))
        elif not field.is_number:
            arrays.append(pa.array([_cell(value) for value in values.tolist()], kind))
        else:
            arrays.append(_numbers(pa, values, kind))
        types.append(pa.field(field.name, kind))
    return pa.Table.from_arrays(arrays, schema=pa.schema(types))


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [dict(zip(_SPAN, span, strict=True)) for span in value]
    return value


def _numbers(pa: Any, values: Values, kind: Any) -> Any:
    if values.dtype.kind != "f":
        return pa.array(values, kind)
    finite = np.isfinite(values)
    if finite.all() and pa.types.is_floating(kind):
        return pa.array(values, kind)
    if pa.types.is_boolean(kind):
        return pa.array(values == 1, kind, mask=~finite)
    if not pa.types.is_floating(kind):
        return pa.array(np.where(finite, values, 0).astype(np.int64), mask=~finite).cast(kind)
    return pa.array(values, kind, mask=~finite)


def from_arrow(table: Any, lengths: Values | None = None) -> TokenTable:
    """Converts a table whose per-token columns are lists of `lengths`, or as long as its `token_ids`."""
    pa = require("pyarrow", "Parquet")
    lists: dict[str, Any] = {}
    columns: dict[str, Values] = {}
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        column = table.column(name).combine_chunks()
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and _may_be_per_token(name):
            lists[name] = column
        else:
            columns[name] = _sequence_values(pa, column)
    if lengths is None:
        lengths = _lengths(lists["token_ids"] if "token_ids" in lists else next(iter(lists.values())))
    for name, column in lists.items():
        columns[name] = _token_values(pa, name, column, lengths)
    return TokenTable(lengths, columns)


def _may_be_per_token(name: str) -> bool:
    return name not in FIELD_BY_NAME or FIELD_BY_NAME[name].per_token


def _lengths(column: Any) -> Values:
    lengths: Values = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def _token_values(pa: Any, name: str, column: Any, lengths: Values) -> Values:
    own = _lengths(column)
    values = _plain(pa, column.flatten())
    if (own == lengths).all():
        return values
    known = np.asarray(column.is_valid())
    wrong = np.flatnonzero(known & (own != lengths))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"row {row}: expected {name} to have {lengths[row]} entries, got {own[row]}")
    spread = np.full(int(lengths.sum()), np.nan, np.float32)
    spread[np.repeat(known, lengths)] = values
    return spread


def _plain(pa: Any, array: Any) -> Values:
    if array.null_count and not pa.types.is_floating(array.type):
        array = array.cast(pa.float32() if pa.types.is_boolean(array.type) else pa.float64())
    values: Values = array.to_numpy(zero_copy_only=False)
    return values


def _sequence_values(pa: Any, column: Any) -> Values:
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _plain(pa, column)
    values = np.empty(len(column), object)
    for row, value in enumerate(column.to_pylist()):
        values[row] = [_span(item) for item in value] if isinstance(value, list) else value
    return values


def _span(item: Any) -> Any:
    return [item[name] for name in _SPAN] if isinstance(item, dict) and set(item) == set(_SPAN) else item


class ParquetSink:
    """A row group per batch."""

    def __init__(self, path: Path, fields: Sequence[Column]) -> None:
        self._fields = fields
        self._file = path.open("wb")
        lists = {field.name: f"{field.name}.list.element" for field in fields if field.per_token}
        plain = [field for field in fields if field.per_token and field.dtype is np.float32]
        pa, pq = require("pyarrow", "Parquet"), require("pyarrow.parquet", "Parquet")
        self._writer = pq.ParquetWriter(
            self._file,
            pa.schema([pa.field(field.name, arrow_type(field)) for field in fields]),
            compression="zstd",
            compression_level=1,
            use_dictionary=[field.name for field in fields if field.dtype is str]
            + [lists[field.name] for field in fields if field.few_values],
            use_byte_stream_split=[lists[field.name] for field in plain if not field.few_values],
            column_encoding={
                lists[name]: "DELTA_BINARY_PACKED" for name in ("position_ids",) if name in lists
            }
            or None,
            write_statistics=[
                field.name for field in fields if not field.per_token and field.name != "role_spans"
            ],
            write_page_checksum=True,
        )

    def write(self, batch: TokenTable) -> None:
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


class ParquetSource:
    """One Parquet file, read as little as possible.

    Rows are records, numbered as they lie in the file; those of a damaged row group are not among them.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self._pa = require("pyarrow", "a .parquet export")
        self._pq = require("pyarrow.parquet", "a .parquet export")
        self._lock = Lock()
        self._group = -1
        """The row group that was read last."""

        self._lengths: Values | None = None
        self._found: dict[str, Rows] = {}
        self._num_rows: dict[int, int] = {}
        self._places: list[tuple[int, int]] = []
        """Row group of each record, and its row within the group."""

        self.keys: list[tuple[int, ...]] = []
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
        except self._pa.ArrowException as error:
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
            raise self._contradiction(f"{num_rows:,} rows", f"{table.num_rows:,} that are there")
        return num_rows

    def names(self, row: int) -> Sequence[str]:
        return self.columns

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> TokenTable:
        known = [name for name in names if name in self.columns]
        if not any(map(_may_be_per_token, known)):
            known.append("loss_mask" if "loss_mask" in self.columns else "token_ids")  # for the lengths
        groups = sorted({self._places[row][0] for row in rows})
        if not groups:
            return TokenTable.concat([])
        batch = self._read(groups[0], known) if len(groups) == 1 else self._table(groups, known)
        starts = dict(zip(groups, np.cumsum([0, *(self._num_rows[group] for group in groups)]), strict=False))
        return batch.select([starts[group] + row for group, row in (self._places[row] for row in rows)])

    def _table(
        self, groups: Sequence[int], names: Sequence[str], lengths: Values | None = None
    ) -> TokenTable:
        where = f"{self.path}, row group {', '.join(map(str, groups))}"
        try:
            with self._file() as file:
                table = file.read_row_groups(groups, columns=names, use_threads=False)
        except (OSError, self._pa.ArrowException) as error:
            raise DataError(f"{where} is damaged: {error}; copy it again") from error
        self._check_rows(groups, table)
        try:
            batch = from_arrow(table, lengths)
            check_values({name: batch[name] for name in batch.columns})
            return batch
        except (DataError, ValueError) as error:
            raise DataError(f"{where}: {error}") from error

    def _read(self, group: int, names: Sequence[str]) -> TokenTable:
        """Columns of a row group; they stay until another one is read."""
        with self._lock:
            if self._group != group:
                self._group, self._lengths, self._found = group, None, {}
            if missing := [name for name in names if name not in self._found]:
                part = self._table([group], missing, self._lengths)
                self._lengths = part.lengths
                self._found |= part.columns
            assert self._lengths is not None
            return TokenTable.of_rows(self._lengths, {name: self._found[name] for name in names})
