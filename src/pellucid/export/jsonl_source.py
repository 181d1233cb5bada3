"""A JSONL export: finds the lines, reads the heads of the records, parses a line when it is asked for."""

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pellucid.data.files import read_lines
from pellucid.errors import DataError
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.schema import BY_NAME, KEY
from pellucid.export.shapes import as_record, check_values, key_of, token_values
from pellucid.export.source import Key, Report

log = logging.getLogger(__name__)

_HEAD_BYTES = 4096
"""The fields before `token_ids` fit into this; where they do not, the whole line is parsed."""

_JSON_STARTS = (b"", *(bytes([byte]) for byte in b'{["-0123456789tfn'))
_KEPT_LINES = 4
_BLOCK = 1 << 20


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

        self.keys: list[Key] = []
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

    def _key(self, text: mmap.mmap, number: int, start: int, stop: int) -> Key | None:
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
        parts = [self._row(row, names) for row in rows]
        return ColumnBatch.concat(parts) if parts else ColumnBatch(np.zeros(0, np.int64), {})

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
    kind = np.dtype(BY_NAME[name].dtype) if name in BY_NAME and BY_NAME[name].dtype is not str else None
    if kind is not None and kind.kind in "iuf" and isinstance(value, int | float):
        return np.array([value], kind)
    if value is None and kind is not None and kind.kind in "iuf":
        return np.array([np.nan], np.float32)
    column = np.empty(1, object)
    column[0] = value
    return column
