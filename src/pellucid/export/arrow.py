"""Columns as Arrow tables and back: one row per sequence, per-token columns as lists.

How they lie in a Parquet file is decided here, too: zstd, floats split by byte (their exponents compress,
their mantissas do not), what is constant per sequence as a dictionary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.errors import DataError
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.optional import require
from pellucid.export.schema import BY_NAME, NAMES, Field

_REPEATED = ("advantages", "rewards", "temperatures", "policy_versions")
"""Per-token columns of few values."""

_SPAN = ("role", "start", "stop")


def arrow_type(field: Field) -> Any:
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
        field = BY_NAME.get(name)
        if field is None or field.dtype is object or pa.types.is_null(kind):
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


def to_arrow(batch: ColumnBatch, fields: Sequence[Field]) -> Any:
    pa = require("pyarrow", "Parquet")
    offsets = pa.array(batch.offsets.astype(np.int32))
    arrays, types = [], []
    for field in fields:
        kind, values = arrow_type(field), batch.columns[field.name]
        if field.per_token:
            arrays.append(pa.ListArray.from_arrays(offsets, _numbers(pa, values, kind.value_type)))
        elif field.dtype in (str, object):
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


def open_writer(sink: Any, fields: Sequence[Field]) -> Any:
    """Returns a writer of tables with these fields; each call of `write_table` is a row group."""
    pa, pq = require("pyarrow", "Parquet"), require("pyarrow.parquet", "Parquet")
    names = {field.name for field in fields}
    lists = {field.name: f"{field.name}.list.element" for field in fields if field.per_token}
    split = [
        lists[field.name]
        for field in fields
        if field.per_token and field.dtype is np.float32 and field.name not in _REPEATED
    ]
    dictionaries = [field.name for field in fields if field.dtype is str]
    dictionaries += [lists[name] for name in _REPEATED if name in lists]
    delta = {lists["position_ids"]: "DELTA_BINARY_PACKED"} if "position_ids" in names else None
    return pq.ParquetWriter(
        sink,
        pa.schema([pa.field(field.name, arrow_type(field)) for field in fields]),
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionaries,
        use_byte_stream_split=split,
        column_encoding=delta,
        write_statistics=[
            field.name for field in fields if not field.per_token and field.dtype is not object
        ],
        write_page_checksum=True,
    )


def from_arrow(table: Any, lengths: Values | None = None) -> ColumnBatch:
    """Converts a table whose per-token columns are lists of `lengths`, or as long as its `token_ids`."""
    pa = require("pyarrow", "Parquet")
    table = table.combine_chunks()
    lists: dict[str, Any] = {}
    columns: dict[str, Values] = {}
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        column = _one_chunk(pa, table.column(name))
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and (name not in BY_NAME or BY_NAME[name].per_token):
            lists[name] = column
        else:
            columns[name] = _sequence_values(pa, column)
    if lengths is None:
        lengths = _lengths(lists["token_ids"] if "token_ids" in lists else next(iter(lists.values())))
    for name, column in lists.items():
        columns[name] = _token_values(pa, name, column, lengths)
    return ColumnBatch(lengths, columns)


def _one_chunk(pa: Any, column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


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
