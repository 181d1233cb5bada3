"""Where metrics go. JSONL always: one flat record per step, readable while the run goes on.

A JSONL file that cannot be written stops the run: training without its record is worthless. Any other
sink is a convenience and is `Guarded`: it may fail, and the run goes on without it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from pellucid.data.files import append_whole, read_lines, replace_file, require_own
from pellucid.errors import DataError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """`{"step": 3, "time": 1760000000.0, "loss": 0.1, …}` per line; a number that is not finite is null.

    A run that is resumed takes back what it wrote before of the first step that it logs, and after it.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_own(path)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._resumes = resume

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._resumes:
            drop_metrics(self._path, step)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._resumes = False
        record = {"step": step, "time": time.time(), **values}
        append_whole(self._file, orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        self._file.close()


class Guarded:
    """A sink that cannot stop the run: its first failure is reported, and after that nothing is logged to it.

    It is closed all the same, so that it gives back its files and ports.
    """

    def __init__(self, sink: Sink, key: str) -> None:
        self._sink = sink
        self._key = key
        self._failed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._failed:
            self._attempt(lambda: self._sink.log(step, values))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "%s failed and is switched off (%s: %s); the run and its JSONL go on",
                    self._key,
                    type(error).__name__,
                    error,
                )
            self._failed = True


class Tee:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics file; a torn last line is left out."""
    for number, line in read_lines(path):
        if not line.endswith(b"\n"):
            return
        yield parse_metrics(f"{path}:{number}", line)


def parse_metrics(place: str, line: bytes) -> dict[str, Any]:
    """Returns one record: `step`, and numbers by their names, with null for those that are not finite."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place} is damaged: {error}; delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(f"{place} is no object with a step; delete that line")
    return record


def drop_metrics(path: Path, start: int) -> None:
    """Takes back the records from step `start` on, and a torn last line."""
    if path.exists():
        kept = [record for record in read_metrics(path) if record["step"] < start]
        replace_file(path, b"".join(orjson.dumps(record) + b"\n" for record in kept))
