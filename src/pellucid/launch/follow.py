"""Follows the metrics and alarms of a run while its processes write them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pellucid.data.alarms import Alarm, alarms_path, as_alarm
from pellucid.data.files import read_lines

T = TypeVar("T")

Record = Mapping[str, Any]
"""One line of a metrics file: `{"step": 3, "loss": 0.1, …}`."""


def number_in(record: Record, name: str) -> float | None:
    """Returns a number of a record; None if it is missing, was not finite, or is no number."""
    value = record.get(name)
    return value if isinstance(value, int | float) else None


class JsonlFollower(Generic[T]):
    """The lines added to a JSONL file since the last look; a line is read once, when it is complete."""

    def __init__(self, path: Path, parse: Callable[[str, bytes], T]) -> None:
        """`parse` is called with the place of a line, `FILE:NUMBER`, and the line."""
        self._path = path
        self._parse = parse
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[T]:
        found = []
        for _, line in read_lines(self._path, self._offset):
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._num_lines += 1
            found.append(self._parse(f"{self._path}:{self._num_lines}", line))
        return found


class AlarmFollower:
    """The alarms that ring after it was made; a line that is no alarm is left out."""

    def __init__(self, output_dir: Path) -> None:
        """Raises DataError where the file is none: a process that rings would wait for a pipe."""
        self._follower = JsonlFollower(alarms_path(output_dir), lambda _, line: as_alarm(line))
        self._follower.read()  # those of the run that is resumed

    def read(self) -> list[Alarm]:
        return [alarm for alarm in self._follower.read() if alarm is not None]


class StepJoin:
    """Merges the records of several sources by step; where two report the same key, the later source wins.

    join = StepJoin(num_sources=2)
    join.add(0, [{"step": 1, "reward/all": 0.5}])
    join.complete()                                -> []
    join.add(1, [{"step": 1, "loss": 0.1}])
    join.complete()                                -> [{"step": 1, "reward/all": 0.5, "loss": 0.1}]
    """

    def __init__(self, num_sources: int) -> None:
        self._num_sources = num_sources
        self._waiting: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, source: int, records: Iterable[Record]) -> None:
        for record in records:
            self._waiting.setdefault(record["step"], {}).setdefault(source, {}).update(record)

    def complete(self) -> list[Record]:
        """Returns the steps that every source has reported, in order; each is handed out once."""
        steps = sorted(step for step, parts in self._waiting.items() if len(parts) == self._num_sources)
        return [self._merge(self._waiting.pop(step)) for step in steps]

    @staticmethod
    def _merge(parts: dict[int, dict[str, Any]]) -> Record:
        merged: dict[str, Any] = {}
        for source in sorted(parts):
            merged |= parts[source]
        return merged
