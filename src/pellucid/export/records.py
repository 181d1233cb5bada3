"""Records as a reader returns them: one by one, many of them in columns, or as the tables of other tools."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from pellucid.data.schema import FIELDS, Column
from pellucid.errors import DataError
from pellucid.export.batch import BY_NAME, ColumnBatch, Values, derive, is_per_token, sources
from pellucid.export.parquet import ParquetSource, require, to_arrow

Key = tuple[int, ...]

Wanted = Any
"""A value, a collection of values, or a function that says whether a value is wanted."""


class RecordSource(Protocol):
    """One export file, read as little as possible.

    Rows are records, numbered as they lie in the file; one that is torn or damaged is not among them.
    """

    path: Path
    keys: list[Key]
    """(step, rank, index) of each row."""

    def names(self, row: int) -> Sequence[str]:
        """Returns the columns that a record has."""

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        """Returns these columns of these rows; a column that one of the rows lacks is left out."""


def read_columns(source: RecordSource, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
    """Reads columns of some rows; derives those that are not stored, or leaves them out."""
    batch = source.batch(rows, names)
    columns = {name: batch.columns[name] for name in names if name in batch.columns}
    derived = [name for name in names if name not in columns and name in BY_NAME and BY_NAME[name].derivable]
    if derived:
        needed = source.batch(rows, list({other: None for name in derived for other in sources(name)}))
        for name in derived:
            if set(sources(name)) - {"training_mode"} <= needed.columns.keys():
                columns[name] = derive(needed, name)
    return ColumnBatch(batch.lengths, columns)


@dataclass(frozen=True, slots=True, eq=False)
class Record(Mapping[str, Any]):
    """One sequence; a field is read when it is first asked for.

    Per-token fields are arrays: null is NaN, and a mask that the loss does not have (sft has no trust region)
    is None. Fields that follow from others are there even if the file leaves them out.
    """

    source: RecordSource
    row: int
    key: Key
    """(step, rank, export_sequence_idx)."""

    @property
    def num_tokens(self) -> int:
        return len(self["token_ids"])

    def __getitem__(self, name: str) -> Any:
        return self._read([name], _mask_or_none)[name]

    def __iter__(self) -> Iterator[str]:
        stored = self.source.names(self.row)
        yield from stored
        for field in FIELDS:
            if field.derivable and field.name not in stored and set(sources(field.name)) <= set(stored):
                yield field.name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def arrays(self) -> dict[str, Any]:
        """All fields at once, as `record[name]` has them."""
        return self._read(list(self), _mask_or_none)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, null as None: what the JSONL has."""
        return self._read(list(self), lambda name, values: _plain(values))

    def _read(self, names: Sequence[str], present: Callable[[str, Values], Any]) -> dict[str, Any]:
        batch = read_columns(self.source, [self.row], names)
        return {
            name: present(name, values) if is_per_token(name, values, batch) else _scalar(values)
            for name, values in batch.columns.items()
        }


class Records(Sequence[Record]):
    """Some records, in the order of (step, rank, index). Nothing is read before it is asked for."""

    def __init__(self, entries: Sequence[tuple[RecordSource, int]]) -> None:
        self._entries = entries

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> "Records": ...

    def __getitem__(self, index: int | slice) -> "Record | Records":
        if isinstance(index, slice):
            return Records(self._entries[index])
        source, row = self._entries[index]
        return Record(source, row, source.keys[row])

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each record."""
        return self.batch([]).lengths

    def column(self, name: str) -> Values:
        """A per-token field of all records end to end, or a per-sequence field with one value per record.

        In floats null is NaN; a mask is False where a loss has none.
        """
        batch = self.batch([name])
        field = BY_NAME.get(name)
        if not self and field is not None:
            return np.empty(0, field.array_dtype)
        if name not in batch.columns:
            raise DataError(f"not every one of the {len(self)} records has {name}, and it cannot be derived")
        values = batch.columns[name]
        return values == 1 if field is not None and field.dtype is np.bool_ else values

    def batch(self, names: Sequence[str]) -> ColumnBatch:
        """Returns those of these columns that all records have."""
        return ColumnBatch.concat([read_columns(source, rows, names) for source, rows in self.files()])

    def where(self, **wanted: Wanted) -> "Records":
        """Those whose per-sequence fields are as wanted: a value, one of several, or as a function says.

            records.where(env_name="math", training_mode={"rl", "opd"}, reward=lambda reward: reward > 0)

        Only these fields are read.
        """
        for name in wanted:
            if name not in BY_NAME or BY_NAME[name].per_token:
                known = ", ".join(field.name for field in FIELDS if not field.per_token)
                raise DataError(f"where({name}=…): not a field of a sequence; those are {known}")
        kept = np.ones(len(self), np.bool_)
        for name, value in wanted.items():
            kept &= np.fromiter(map(_test(value), self.column(name)), np.bool_, len(self))
        return Records([self._entries[index] for index in np.flatnonzero(kept).tolist()])

    def fields(self) -> tuple[Column, ...]:
        """Those of the schema that all records have, stored or derived."""
        firsts = {source: index for index, (source, _) in reversed(list(enumerate(self._entries)))}
        names = set.intersection(*(set(self[index]) for index in firsts.values())) if self else set()
        return tuple(field for field in FIELDS if field.name in names)

    def files(self) -> Iterator[tuple[RecordSource, list[int]]]:
        """Yields the rows of each file, in order."""
        for source, members in groupby(self._entries, key=lambda entry: entry[0]):
            yield source, [row for _, row in members]

    def whole_parquet_files(self) -> list[str] | None:
        """Returns their paths, if the records are all there is in Parquet files that leave out nothing."""
        files = []
        for source, rows in self.files():
            if (
                not isinstance(source, ParquetSource)
                or source.num_damaged
                or rows != list(range(len(source.keys)))
                or any(field.derivable and field.name not in source.columns for field in FIELDS)
            ):
                return None
            files.append(str(source.path))
        return files

    def arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pyarrow.Table` with one row per record; per-token fields are lists."""
        require("pyarrow", "arrow()")
        for name in columns or ():
            if name not in BY_NAME:
                raise DataError(f"arrow(columns=…): {name!r} is not a field; see docs/read-an-export.md")
        chosen = self.fields() if columns is None else [BY_NAME[name] for name in columns]
        batch = self.batch([field.name for field in chosen])
        return to_arrow(batch, [field for field in chosen if field.name in batch.columns])

    def pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pandas.DataFrame` with one row per record; per-token fields are arrays."""
        require("pandas", "pandas()")
        return self.arrow(columns).to_pandas()

    def polars(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `polars.DataFrame` with one row per record; per-token fields are lists."""
        return require("polars", "polars()").from_arrow(self.arrow(columns))

    def duckdb(self) -> Any:
        """A DuckDB connection with the views `sequences`, a row per record, and `tokens`, a row per token.

        DuckDB reads whole Parquet files itself, so that a query over a long run takes the columns and row
        groups that it needs. Any other selection goes through Arrow, in memory.
        """
        connection = require("duckdb", "duckdb()").connect()
        if (files := self.whole_parquet_files()) is not None:
            names = ", ".join(f"'{file.replace(chr(39), chr(39) * 2)}'" for file in files)
            connection.execute(
                f"CREATE VIEW sequences AS SELECT * FROM read_parquet([{names}], union_by_name = true)"
            )
            stored = {row[0] for row in connection.execute("DESCRIBE sequences").fetchall()}
        else:
            table = self.arrow()
            connection.register("sequences", table)
            stored = set(table.schema.names)
        known = [field for field in FIELDS if field.name in stored]
        sequence = [field.name for field in known if not field.per_token]
        token = [f"unnest({field.name}) AS {field.name}" for field in known if field.per_token]
        place = "unnest(range(len(token_ids))) AS token"
        shown = ", ".join([*sequence, place, *token])
        connection.execute(f"CREATE VIEW tokens AS SELECT {shown} FROM sequences")
        return connection


def _test(wanted: Wanted) -> Callable[[Any], bool]:
    if callable(wanted):
        return lambda value: bool(wanted(value))
    if isinstance(wanted, Collection) and not isinstance(wanted, str | bytes):
        return wanted.__contains__
    return lambda value: bool(value == wanted)


def _mask_or_none(name: str, values: Values) -> Values | None:
    if name not in BY_NAME or BY_NAME[name].dtype is not np.bool_ or values.dtype == np.bool_:
        return values
    return None if np.isnan(values).all() else values == 1


def _scalar(values: Values) -> Any:
    value = values[0]
    if isinstance(value, np.generic):
        value = value.item()
    return None if value != value else value  # NaN is null


def _plain(values: Values) -> list[Any]:
    listed: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        for index in np.flatnonzero(~np.isfinite(values)).tolist():
            listed[index] = None
    return listed
