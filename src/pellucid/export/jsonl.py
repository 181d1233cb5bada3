"""Records as JSON lines: one object per sequence, arrays aligned per token, what is not finite as null.

The reader finds the lines, reads the heads of the records, and parses a line when it is asked for. It takes
records of any trainer: fewer columns are fine, and so is the older form, a list of objects under `tokens`.
Anything else is an error that says what was expected and what was found.
"""

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pellucid.data.files import read_lines
from pellucid.data.schema import FIELDS, TOKEN_FIELDS, Column
from pellucid.errors import DataError
from pellucid.export.batch import BY_NAME, KEY, NAMES, SCHEMA_VERSION, ColumnBatch, Values

log = logging.getLogger(__name__)

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_BUFFER_BYTES = 1 << 18
"""Size of the buffer for lines: one write per line would take a third longer."""

_HEAD_BYTES = 4096
"""The fields before `token_ids` fit into this; where they do not, the whole line is parsed."""

_JSON_STARTS = (b"", *(bytes([byte]) for byte in b'{["-0123456789tfn'))
_KEPT_LINES = 4
_BLOCK = 1 << 20

Report = Callable[[str], object]

OLDER_NAMES = {
    "id": "token_ids",
    "position": "position_ids",
    **{each.name.removesuffix("s"): each.name for each in TOKEN_FIELDS},
}
"""Key of a per-token object -> column; a key that is not here keeps its name."""


class JsonlRecords:
    """A file that records are written to."""

    def __init__(self, path: Path, fields: Sequence[Column]) -> None:
        self._fields = fields
        self._file = path.open("wb", buffering=_BUFFER_BYTES)

    def write(self, batch: ColumnBatch) -> None:
        """Writes one line per sequence; the digits of a float32 are the fewest that give it back."""
        columns = [(field.name, field.per_token, batch.columns[field.name]) for field in self._fields]
        for row, (start, stop) in enumerate(pairwise(batch.offsets.tolist())):
            record = {name: values[start:stop] if many else values[row] for name, many, values in columns}
            self._file.write(orjson.dumps(record, option=_OPTIONS))

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Closes the file without completing it."""
        with suppress(OSError):
            self._file.close()


def read_json_lines(path: Path, report: Report = log.warning) -> Iterator[tuple[int, Any]]:
    """(line number, value) of every line; a torn last line is reported and left out."""
    for number, line in read_lines(path):
        if line.strip():
            value = parse_line(line, partial(_place, path, number), report)
            if value is not _TORN:
                yield number, value


_TORN = object()


def _place(path: Path, number: int) -> str:
    return f"{path}:{number}"


def parse_line(line: bytes, place: Callable[[], str], report: Report) -> Any:
    """Parses one line; `place` names it, and is called only if something is wrong with it."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if line.endswith(b"\n"):
            raise DataError(f"{place()} is not JSON: {error}") from error
        report(f"{place()} is cut short (still being written, or its writer died); skipped")
        return _TORN


class JsonlSource:
    def __init__(self, path: Path, report: Report, span: tuple[int, int] | None = None) -> None:
        """`span`: the bytes that are read, where it is not the whole file; they begin and end with a line."""
        self.path = path
        self._span = span
        self._report = report
        self._spans: list[tuple[int, int, int]] = []
        """Line number, counted from the span's start, and first and last byte of each record."""

        self.keys: list[tuple[int, ...]] = []
        self._find_lines()
        self._record = lru_cache(_KEPT_LINES)(self._parse)

    def _find_lines(self) -> None:
        if self.path.stat().st_size == 0:
            return
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start, end = (0, len(text)) if self._span is None else self._span
            end, number = min(end, len(text)), 1
            while start < end:
                self._check_beginning(text, number, start)
                stop = text.find(b"\n", start, end) + 1 or end
                if text[start : start + 1] != b"\n" and (key := self._key(text, number, start, stop)):
                    self._spans.append((number, start, stop))
                    self.keys.append(key)
                start, number = stop, number + 1

    def _check_beginning(self, text: mmap.mmap, number: int, start: int) -> None:
        """Refuses what is no record before it is searched for an end: it may be very long."""
        first = text[start : start + _HEAD_BYTES].lstrip()[:1]
        if first not in _JSON_STARTS:
            raise DataError(f"{self._place(number)} is not JSON: a record begins with a brace")

    def _key(self, text: mmap.mmap, number: int, start: int, stop: int) -> tuple[int, ...] | None:
        """From the head of the record, if it has one; None for a line without a record."""
        cut = text.find(b'"token_ids"', start, min(stop, start + _HEAD_BYTES))
        if cut > 0 and text[stop - 1 : stop] == b"\n":
            try:
                head = orjson.loads(text[start:cut].rstrip(b", \t") + b"}")
                if all(isinstance(head.get(name), int) for name in KEY):
                    return key_of(head)
            except orjson.JSONDecodeError:
                pass  # the whole line tells
        line = text[start:stop]
        if not line.strip():
            return None
        value = parse_line(line, partial(self._place, number), self._report)
        return None if value is _TORN else key_of(self._checked(number, value))

    def _checked(self, number: int, value: Any) -> dict[str, Any]:
        with self._located(number):
            return as_record(value)

    @contextmanager
    def _located(self, number: int) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._place(number)}: {error}") from error

    def _place(self, number: int) -> str:
        return _place(self.path, self._num_lines_before + number)

    @cached_property
    def _num_lines_before(self) -> int:
        """Lines of the file before the span; the file is read for them only when an error names a line."""
        start = 0 if self._span is None else self._span[0]
        if start == 0:
            return 0
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return sum(text[at : min(at + _BLOCK, start)].count(b"\n") for at in range(0, start, _BLOCK))

    def _parse(self, row: int) -> dict[str, Any]:
        number, start, stop = self._spans[row]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        return self._checked(number, parse_line(line, partial(self._place, number), self._report))

    def names(self, row: int) -> Sequence[str]:
        """A null is the value of a sequence's field (no reward, say), but the lack of a per-token column."""
        return [
            name
            for name, value in self._record(row).items()
            if value is not None or (name in BY_NAME and not BY_NAME[name].per_token)
        ]

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        return ColumnBatch.concat([self._row(row, names) for row in rows])

    def _row(self, row: int, names: Sequence[str]) -> ColumnBatch:
        record, columns = self._record(row), {}
        num_tokens = len(record["token_ids"])
        with self._located(self._spans[row][0]):
            for name in names:
                if _is_per_token(name, record):
                    if record.get(name) is not None:
                        columns[name] = token_values(record, name)
                elif name in record:
                    columns[name] = _one(name, record[name])
            check_values(columns)
        return ColumnBatch(np.array([num_tokens], np.int64), columns)


def _is_per_token(name: str, record: Mapping[str, Any]) -> bool:
    if name in BY_NAME:
        return BY_NAME[name].per_token
    value = record.get(name)
    return isinstance(value, list) and len(value) == len(record["token_ids"])


def _one(name: str, value: Any) -> Values:
    """Returns a per-sequence value as a column of one."""
    if name in BY_NAME and BY_NAME[name].is_number and (value is None or isinstance(value, int | float)):
        return np.array([np.nan], np.float32) if value is None else np.array([value], BY_NAME[name].dtype)
    column = np.empty(1, object)
    column[0] = value
    return column


def as_record(value: Any) -> dict[str, Any]:
    """Returns the record with its columns as lists."""
    if not isinstance(value, dict):
        raise DataError(f"expected one JSON object per line, got {type(value).__name__}")
    record: dict[str, Any] = value if "token_ids" in value else _from_token_objects(value)
    ids = record["token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"expected token_ids to be a list of integers, got {_preview(ids)}")
    for name in (field.name for field in TOKEN_FIELDS):
        column = record.get(name)
        if column is not None and (not isinstance(column, list) or len(column) != len(ids)):
            got = f"{len(column)} entries" if isinstance(column, list) else type(column).__name__
            raise DataError(f"expected {name} to be a list of {len(ids)} entries, one per token, got {got}")
    key_of(record)
    if isinstance(version := record.get("schema_version"), int):
        _check_version(version)
    for name, rule in _RULES.items():
        if not isinstance(record.get(name), rule):
            raise DataError(f"expected {name} to be {_KINDS[rule]} or null, got {_preview(record[name])}")
    return record


_NUMBER, _TEXT, _ID = (int, float, type(None)), (str, type(None)), (int, float, str, type(None))
_KINDS = {_NUMBER: "a number", _TEXT: "text", _ID: "text, a number"}
_RULES = {
    field.name: _NUMBER if field.dtype is not str else _TEXT if field.name in NAMES else _ID
    for field in FIELDS
    if not field.per_token and field.name != "role_spans"
}
"""Other trainers number their examples and groups."""


def key_of(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the fields by which records are ordered; 0 for a missing one."""
    for name in KEY:
        if not isinstance(record.get(name, 0), int):
            raise DataError(f"expected {name} to be an integer, got {_preview(record[name])}")
    return tuple(record.get(name, 0) for name in KEY)


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise DataError(
            f"schema_version = {version} is of a newer pellucid; this one reads up to {SCHEMA_VERSION}; "
            "upgrade it"
        )


def check_values(columns: Mapping[str, Values]) -> None:
    """Raises DataError for a newer schema, and for a number that no record has and that would be taken for an
    index or a divisor."""
    for version in columns.get("schema_version", ()):
        _check_version(version)
    for name, least in (("position_ids", 0), ("denominator", 1)):
        values = columns.get(name)
        if values is not None and (wrong := values < least).any():  # null is NaN, which is not less
            raise DataError(f"expected {name} to be at least {least}, got {values[wrong][0]}")


def token_values(record: Mapping[str, Any], name: str) -> Values:
    """Returns a per-token column as an array; null is NaN, and a mask with nulls is float32."""
    values = record[name]
    dtype = np.dtype(BY_NAME[name].dtype) if name in BY_NAME else np.dtype(np.float64)
    try:
        if dtype.kind == "f":
            with np.errstate(over="ignore"):  # beyond float32 is infinite, which is null
                return np.array(values, dtype)
        if None in values:
            return np.array(values, np.float32 if dtype.kind == "b" else np.float64)
        return np.array(values).astype(dtype, casting="same_kind" if dtype.kind == "b" else "unsafe")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} is not a list of numbers: {error}") from error


def _from_token_objects(value: Mapping[str, Any]) -> dict[str, Any]:
    tokens = value.get("tokens")
    if not isinstance(tokens, list):
        raise DataError(
            "expected a record with token_ids (or, in the older form, a list of objects under tokens), "
            f"got the keys {sorted(value)[:8]}"
        )
    for index, token in enumerate(tokens):
        if not isinstance(token, dict) or "id" not in token:
            raise DataError(f"expected an object with an id at tokens[{index}], got {_preview(token)}")
    keys = dict.fromkeys(key for token in tokens for key in token)
    columns = {OLDER_NAMES.get(key, key): [token.get(key) for token in tokens] for key in keys}
    rest = {key: entry for key, entry in value.items() if key != "tokens"}
    return {"token_ids": [], **columns, **rest}


def _preview(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
