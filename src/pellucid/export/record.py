"""Records as a reader returns them: one by one, or many of them in columns."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pellucid.errors import DataError
from pellucid.export import frames
from pellucid.export.batch import ColumnBatch, Values, is_per_token
from pellucid.export.derive import derive, sources
from pellucid.export.schema import BY_NAME, FIELDS, Field
from pellucid.export.source import Key, RecordSource

Wanted = Any
"""A value, a collection of values, or a function that says whether a value is wanted."""


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
        batch = read_columns(self.source, [self.row], [name])
        if name not in batch.columns:
            raise KeyError(name)
        values = batch.columns[name]
        return _mask_or_none(name, values) if is_per_token(name, values, batch) else _scalar(values)

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
        return self._all(_mask_or_none)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, null as None: what the JSONL has."""
        return self._all(lambda name, values: _plain(values))

    def _all(self, present: Callable[[str, Values], Any]) -> dict[str, Any]:
        batch = read_columns(self.source, [self.row], list(self))
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
        if not self and name in BY_NAME:
            dtype = BY_NAME[name].dtype
            return np.empty(0, object if dtype is str else dtype)
        if name not in batch.columns:
            raise DataError(f"not every one of the {len(self)} records has {name}, and it cannot be derived")
        values = batch.columns[name]
        if name in BY_NAME and BY_NAME[name].dtype is np.bool_ and values.dtype != np.bool_:
            values = values == 1
        return values

    def batch(self, names: Sequence[str]) -> ColumnBatch:
        """Returns those of these columns that all records have."""
        parts = [read_columns(source, rows, names) for source, rows in self.files()]
        return ColumnBatch.concat(parts) if parts else ColumnBatch(np.zeros(0, np.int64), {})

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

    def arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pyarrow.Table` with one row per record; per-token fields are lists."""
        return frames.arrow(self, columns)

    def pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pandas.DataFrame` with one row per record; per-token fields are arrays."""
        return frames.pandas(self, columns)

    def polars(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `polars.DataFrame` with one row per record; per-token fields are lists."""
        return frames.polars(self, columns)

    def duckdb(self) -> Any:
        """A DuckDB connection with the views `sequences`, a row per record, and `tokens`, a row per token."""
        return frames.duckdb(self)

    def fields(self) -> tuple[Field, ...]:
        """Those of the schema that all records have, stored or derived."""
        names = set.intersection(*(set(self[index]) for index in self._one_per_source())) if self else set()
        return tuple(field for field in FIELDS if field.name in names)

    def _one_per_source(self) -> list[int]:
        firsts: dict[RecordSource, int] = {}
        for index, (source, _) in enumerate(self._entries):
            firsts.setdefault(source, index)
        return list(firsts.values())

    def files(self) -> Iterator[tuple[RecordSource, list[int]]]:
        """Yields the rows of each file, in order."""
        for source, members in groupby(self._entries, key=lambda entry: entry[0]):
            yield source, [row for _, row in members]


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
