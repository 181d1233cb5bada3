"""Where metrics go. JSONL always: one flat record per step, readable while the run goes on."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import orjson


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """`{"step": 3, "time": 1760000000.0, "loss": 0.1, …}` per line; a number that is not finite is null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        record = {"step": step, "time": time.time(), **values}
        self._file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a torn last line is left out."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield orjson.loads(line)
