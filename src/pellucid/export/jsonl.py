"""Records as JSON lines: one object per sequence, arrays aligned per token, what is not finite as null.

The reader finds the lines, reads the heads of the records, and parses a line when it is asked for. It takes
records of any trainer: fewer columns are fine, and so is the older form, a list of objects under `tokens`.
Anything else is an error that says what was expected and what was found.
"""

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import numpy as np
import orjson

from pellucid.data.files import read_lines
from pellucid.data.schema import FIELD_BY_NAME, FIELDS, TOKEN_FIELDS, Column
from pellucid.data.table import TokenTable, Values
from pellucid.errors import DataError
from pellucid.export.foreign import token_records

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1

KEY = ("step", "rank", "export_sequence_idx")
"""Fields that identify a record, and by which records are ordered."""

NAMES = ("env_name", "training_mode")
"""Fields that are text in every trainer's export: parts of a summary are distinguished by them."""

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_BUFFER_BYTES = 1 << 18
"""Size of the buffer for lines: one write per line would take a third longer."""

_HEAD_BYTES = 4096
"""The fields before `token_ids` fit into this; where they do not, the whole line is parsed."""

_JSON_STARTS = (b"", *(bytes([byte]) for byte in b'{["-0123456789tfn'))
_KEPT_LINES = 4
_BLOCK_BYTES = 1 << 22
"""Bytes of lines that are parsed at a time."""

_BLOCK = 1 << 20
_TORN = object()

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

    def write(self, table: TokenTable) -> None:
        """Writes one line per sequence; the digits of a float32 are the fewest that give it back."""
        columns = [(field.name, field.per_token, table[field.name]) for field in self._fields]
        for row, (start, stop) in enumerate(pairwise(table.token_offsets.tolist())):
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
            value = _parse(line, partial("{}:{}".format, path, number), report)
            if value is not _TORN:
                yield number, value


def _parse(line: bytes, place: Callable[[], str], report: Report) -> Any:
    """Parses one line; `place` names it, and is called only if something is wrong with it."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if line.endswith(b"\n"):
            raise DataError(f"{place()} is not JSON: {error}") from error
        report(f"{place()} is cut short (still being written, or its writer died); skipped")
        return _TORN


class JsonlSource:
    """One JSONL file, read as little as possible.

    Rows are records, numbered as they lie in the file; one that is torn is not among them.
    """

    def __init__(self, path: Path, report: Report, span: tuple[int, int] | None = None) -> None:
        """`span`: the bytes that are read, where it is not the whole file; they begin and end with a line."""
        self.path = path
        self._span = span
        self._report = report
        self._spans: list[tuple[int, int, int, int]] = []
        """Line number, counted from the span's start, first and last byte of each record's line, and which of
        the line's records it is: a trace of another system has one for each branch."""

        self.keys: list[tuple[int, ...]] = []
        """(step, rank, index) of each row."""
        self._find_lines()
        self._record = lru_cache(_KEPT_LINES)(self._read)

    def _find_lines(self) -> None:
        if self.path.stat().st_size == 0:
            return
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start, end = (0, len(text)) if self._span is None else self._span
            end, number = min(end, len(text)), 1
            while start < end:
                # Before its end is searched for: what is no record may be very long.
                if text[start] not in b"{\n" and (
                    text[start : start + _HEAD_BYTES].lstrip()[:1] not in _JSON_STARTS
                ):
                    raise DataError(f"{self._place(number)} is not JSON: a record begins with a brace")
                stop = text.find(b"\n", start, end) + 1 or end
                if text[start : start + 1] != b"\n":
                    for part, key in enumerate(self._keys(text, number, start, stop)):
                        self._spans.append((number, start, stop, part))
                        self.keys.append(key)
                start, number = stop, number + 1

    def _keys(self, text: mmap.mmap, number: int, start: int, stop: int) -> list[tuple[int, ...]]:
        """From the head of the record, if it has one; none for a line without a record."""
        cut = text.find(b'"token_ids"', start, min(stop, start + _HEAD_BYTES))
        if cut > 0 and text[stop - 1 : stop] == b"\n":
            with suppress(orjson.JSONDecodeError):  # then the whole line tells
                head = orjson.loads(text[start:cut].rstrip(b", \t") + b"}")
                key = tuple(map(head.get, KEY))
                if {*map(type, key)} == {int}:
                    return [key]
        line = text[start:stop]
        if not line.strip():
            return []
        value = _parse(line, lambda: self._place(number), self._report)
        if value is _TORN:
            return []
        with self._located(number):
            keys = [key_of(record) for record in _as_records(value)]
        if isinstance(value, dict) and not {"token_ids", "tokens"} & value.keys():  # a trace has no index
            keys = [(step, rank, len(self.keys) + part) for part, (step, rank, _) in enumerate(keys)]
        return keys

    @contextmanager
    def _located(self, number: int) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._place(number)}: {error}") from error

    def _place(self, number: int) -> str:
        """Names a line of the file, which is read for the lines before the span only here: for an error."""
        start = 0 if self._span is None else self._span[0]
        with self.path.open("rb") as file:
            while start > 0 and (block := file.read(min(start, _BLOCK))):
                number += block.count(b"\n")
                start -= len(block)
        return f"{self.path}:{number}"

    def _read(self, row: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            return self._parse_row(file, row)

    def _parse_row(self, file: BinaryIO, row: int, wanted: frozenset[str] | None = None) -> dict[str, Any]:
        number, start, stop, part = self._spans[row]
        file.seek(start)
        value = _parse(file.read(stop - start), lambda: self._place(number), self._report)
        with self._located(number):
            return _as_records(value, wanted)[part]

    def _lines(self, rows: Sequence[int]) -> list[bytes]:
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return [text[start:stop] for _, start, stop, _ in map(self._spans.__getitem__, rows)]

    def names(self, row: int) -> Sequence[str]:
        """Returns the columns that a record has. A null is the value of a sequence's field (no reward, say),
        but the lack of a per-token column."""
        return [
            name
            for name, value in self._record(row).items()
            if value is not None or (name in FIELD_BY_NAME and not FIELD_BY_NAME[name].per_token)
        ]

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> TokenTable:
        """Returns these columns of these rows; a column that one of the rows lacks is left out.

        Lists of numbers take ten times the memory of arrays, so that only some lines are parsed at a time.
        """
        tables = [self._block(block, names) for block in self._blocks(rows)]
        for name in names:
            if len({table.is_per_token(name) for table in tables if name in table}) > 1:  # an unknown column
                tables[0] = TokenTable.of_rows(
                    tables[0].lengths, {key: own for key, own in tables[0].columns.items() if key != name}
                )
        return TokenTable.concat(tables)

    def _blocks(self, rows: Sequence[int]) -> Iterator[list[int]]:
        block: list[int] = []
        num_bytes = 0
        for row in rows:
            _, start, stop, _ = self._spans[row]
            if block and num_bytes + stop - start > _BLOCK_BYTES:
                yield block
                block, num_bytes = [], 0
            block.append(row)
            num_bytes += stop - start
        if block:
            yield block

    def _block(self, rows: Sequence[int], names: Sequence[str]) -> TokenTable:
        is_plain = len(rows) > _KEPT_LINES and FIELD_BY_NAME.keys() >= {*names}
        if is_plain and (table := _plain_block(self._lines(rows), names)) is not None:
            return table
        records = self._records(rows, names)
        lengths = np.array([len(record["token_ids"]) for record in records], np.int64)
        columns: dict[str, Values] = {}
        for name in names:
            members = [record for record in records if _has(record, name)]
            try:
                values = _column(members, name)
                check_values({name: values})
            except DataError:
                self._find_fault(rows, name)
                raise
            if len(members) == len(records) and (name in FIELD_BY_NAME or _is_alike(members, name)):
                columns[name] = values
        return TokenTable(lengths, columns)

    def _records(self, rows: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
        """Parses these rows. Of many, the file is opened once and only these columns are checked."""
        if len(rows) <= _KEPT_LINES:
            return [self._record(row) for row in rows]
        wanted = frozenset(names)
        with self.path.open("rb") as file:
            return [self._parse_row(file, row, wanted) for row in rows]

    def _find_fault(self, rows: Sequence[int], name: str) -> None:
        """Raises the error of the first row whose values of a column are wrong."""
        for row in rows:
            record = self._record(row)
            if _has(record, name):
                with self._located(self._spans[row][0]):
                    check_values({name: _column([record], name)})


def _has(record: Mapping[str, Any], name: str) -> bool:
    is_needed = name in FIELD_BY_NAME and FIELD_BY_NAME[name].per_token
    return record.get(name) is not None if is_needed else name in record


def _is_alike(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether an unknown column is of tokens in all records, or of sequences in all."""
    return len({_is_per_token(record, name) for record in records}) < 2


def _is_per_token(record: Mapping[str, Any], name: str) -> bool:
    """Whether a field is a column of tokens: an unknown one is if it is a list as long as `token_ids`."""
    field, value = FIELD_BY_NAME.get(name), record[name]
    if field is not None:
        return field.per_token
    return isinstance(value, list) and len(value) == len(record["token_ids"])


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Values:
    """Returns a field of all these records as one array: null is NaN, and a mask with nulls is float32."""
    field = FIELD_BY_NAME.get(name)
    values = [record[name] for record in records]
    if records and _is_per_token(records[0], name) and (field is not None or _is_alike(records, name)):
        joined = list(chain.from_iterable(values))
        return _token_values(name, joined, np.dtype(np.float64 if field is None else field.dtype))
    return _sequence_values(name, values)


def _sequence_values(name: str, values: list[Any]) -> Values:
    field = FIELD_BY_NAME.get(name)
    kinds = set(map(type, values))
    if field is not None and field.is_number and kinds <= {int, float, bool, NoneType}:
        known = [] if kinds == {NoneType} else [field.dtype]
        null = [np.float32] if NoneType in kinds else []
        try:
            return np.array(values, np.result_type(*known, *null))
        except OverflowError as error:
            raise DataError(f"{name} is too large: {error}") from error
    column = np.empty(len(values), object)
    for row, value in enumerate(values):  # at once, numpy would take lists for a second dimension
        column[row] = value
    return column


def _token_values(name: str, values: list[Any], dtype: np.dtype[Any]) -> Values:
    try:
        if dtype.kind == "f":
            with np.errstate(over="ignore"):  # beyond float32 is infinite, which is null
                return np.array(values, dtype)
        if None in values:
            return np.array(values, np.float32 if dtype.kind == "b" else np.float64)
        return np.array(values).astype(dtype, casting="same_kind" if dtype.kind == "b" else "unsafe")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} is not a list of numbers: {error}") from error


def _plain_block(lines: Sequence[bytes], names: Sequence[str]) -> TokenTable | None:
    """Returns columns of records whose lines are as pellucid writes them; None if one is not, or if a value
    is not what it has to be: then reading records one by one finds out.

    A column's texts are put together and parsed at once: record by record that would take twice as long.
    """
    texts = _field_texts(lines, [*dict.fromkeys(("token_ids", "schema_version", *names))])
    if texts is None or "token_ids" not in texts:
        return None
    lengths = np.zeros(len(lines), np.int64)
    columns: dict[str, Values] = {}
    try:
        for name, found in texts.items():
            values = orjson.loads(found)
            if name not in _TOKEN_NAMES:
                if name in _RULES and not all(isinstance(value, _RULES[name]) for value in values):
                    return None
                columns[name] = _sequence_values(name, values)
            elif set(map(type, values)) == {list} and found.count(b"[") == 1 + len(lines):
                joined = list(chain.from_iterable(values))
                if name == "token_ids":
                    lengths[:] = list(map(len, values))
                    if not set(map(type, joined)) <= {int}:
                        return None
                elif lengths.tolist() != list(map(len, values)):
                    return None
                columns[name] = _token_values(name, joined, np.dtype(FIELD_BY_NAME[name].dtype))
            elif any(value is not None for value in values):
                return None
        check_values(columns)
    except (DataError, orjson.JSONDecodeError):
        return None
    return TokenTable(lengths, {name: columns[name] for name in names if name in columns})


def _field_texts(lines: Sequence[bytes], names: Sequence[str]) -> dict[str, bytes] | None:
    """Cuts some fields out of lines: a JSON list of each. Leaves out a field that no line has; None where
    only some have it, or lines are not flat objects without escapes.

    In such an object, every second part between quotes is a text, and those that a colon follows are names.
    Lines with as many quotes mostly have the same names at the same places.
    """
    layouts: dict[int, _Layout] = {}
    found: list[list[bytes]] = [[] for _ in names]
    for line in lines:
        if not line.startswith(b"{") or not line.endswith(b"}\n") or b"\\" in line or line.count(b"{") > 1:
            return None
        parts = line[1:-2].split(b'"')
        layout = layouts.get(len(parts))
        if layout is None or layout.read(parts) != layout.keys:
            layout = layouts[len(parts)] = _Layout(parts, names)
            if len({*layout.keys}) < len(layout.keys):
                return None
        for column, start, stop in layout.places:
            text = parts[start] if stop == start + 1 else b'"'.join(parts[start:stop])
            found[column].append(text.strip(b" ,:"))
    if any(texts and len(texts) < len(lines) for texts in found):
        return None
    return {name: b"[%s]" % b",".join(texts) for name, texts in zip(names, found, strict=True) if texts}


class _Layout:
    """Where the names of a line are among the parts between its quotes, and some of its values."""

    def __init__(self, parts: list[bytes], names: Sequence[str]) -> None:
        at = [place for place in range(1, len(parts) - 1, 2) if parts[place + 1].lstrip()[:1] == b":"]
        self.read = itemgetter(0, *at)
        self.keys = self.read(parts)
        spans = dict(zip(self.keys[1:], pairwise([*at, len(parts)]), strict=True))
        self.places = [
            (column, spans[key][0] + 1, spans[key][1])
            for column, key in enumerate(name.encode() for name in names)
            if key in spans
        ]
        """(number of the name, first part, last part) of each value that the line has."""


def _as_records(value: Any, wanted: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """Returns the records of a line: one, or the branches of another system's trace."""
    is_record = isinstance(value, dict) and "token_ids" in value
    branches = None if is_record else token_records(value)
    return [as_record(one, wanted) for one in ([value] if branches is None else branches)]


def as_record(value: Any, wanted: frozenset[str] | None = None) -> dict[str, Any]:
    """Returns the record with its columns as lists; checks them, or only those that are `wanted`."""
    if not isinstance(value, dict):
        raise DataError(f"expected one JSON object per line, got {type(value).__name__}")
    record: dict[str, Any] = value if "token_ids" in value else _from_token_objects(value)
    ids = record["token_ids"]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise DataError(f"expected token_ids to be a list of integers, got {_preview(ids)}")
    for name in _TOKEN_NAMES if wanted is None else _TOKEN_NAMES & wanted:
        column = record.get(name)
        if column is not None and (not isinstance(column, list) or len(column) != len(ids)):
            got = f"{len(column)} entries" if isinstance(column, list) else type(column).__name__
            raise DataError(f"expected {name} to be a list of {len(ids)} entries, one per token, got {got}")
    if wanted is None:
        key_of(record)
    if isinstance(version := record.get("schema_version"), int):
        _check_version(version)
    for name in _RULES.keys() if wanted is None else _RULES.keys() & wanted:
        if not isinstance(record.get(name), rule := _RULES[name]):
            raise DataError(f"expected {name} to be {_KINDS[rule]} or null, got {_preview(record[name])}")
    return record


_TOKEN_NAMES = {field.name: None for field in TOKEN_FIELDS}.keys()
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
    text = orjson.dumps(value[:60] if isinstance(value, str | list) else value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
