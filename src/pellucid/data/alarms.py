"""Alarms: findings that a sound run never shows; see docs/alarms.md.

An alarm rings once in a process: as a warning in its log, as a line of `metrics/alarms.jsonl`, which the
console and the summary of a run show, and as the metric `alarms/NAME`, 1 from then on. It stops nothing.

Readers do not trust the file: they report lines that are no alarms, and leave them out.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from pellucid.data.files import append_whole, read_lines, require_own
from pellucid.data.plain import printable
from pellucid.errors import DataError

logger = logging.getLogger(__name__)

CHANCE = 1e-6
"""Probability that a test rings in a sound run, over all of its steps."""

MAX_ALARMS = 32
"""Most alarms that are read of a run; there are fewer kinds."""

_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Words = Annotated[str, msgspec.Meta(max_length=4096)]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    name: _Name
    step: _Step
    """Step at which the alarm first rang; for the orchestrator's, the step of the batch being sampled."""

    statistic: _Words
    """Name of the measured quantity, in words."""

    value: float | None
    """Measured value; a number that is not finite is None in the file."""

    threshold: float
    p_value: float | None = None
    """Probability of such a value by chance; None for an alarm that chance cannot ring."""

    example: _Words = ""
    """First occurrence, such as a rollout or a tensor."""

    causes: _Words
    """Possible causes, and what to do."""

    def line(self) -> str:
        return _one_line(f"ALARM {self.name} at step {self.step}: {self.finding()}. {self.causes}")

    def finding(self) -> str:
        """Describes the value, its threshold and the first occurrence."""
        p_value = "" if self.p_value is None else f", p = {self.p_value:.2g} < {CHANCE:g}"
        value = "not finite" if self.value is None or not math.isfinite(self.value) else f"{self.value:.4g}"
        example = f"; first seen: {self.example}" if self.example else ""
        return _one_line(f"{self.statistic}: {value} (threshold {self.threshold:.4g}{p_value}){example}")


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n"))


def alarms_path(output_dir: Path) -> Path:
    return output_dir / "metrics" / "alarms.jsonl"


class Bell:
    """The alarms of one process; each rings once."""

    def __init__(self, output_dir: Path, causes: Mapping[str, str]) -> None:
        """Takes the possible causes of each alarm, by its name."""
        self._path = alarms_path(output_dir)
        self._causes = causes
        self._metrics: dict[str, float] = {_metric(name): 0 for name in causes}

    def ring(
        self,
        name: str,
        step: int,
        statistic: str,
        value: float,
        threshold: float,
        example: str,
        p_value: float | None = None,
    ) -> None:
        """Raises nothing: where the file cannot be written, the line is in the log alone."""
        if self._metrics[_metric(name)]:
            return
        self._metrics[_metric(name)] = 1
        alarm = Alarm(
            name=name,
            step=step,
            statistic=statistic,
            value=value,
            threshold=threshold,
            p_value=p_value,
            example=example,
            causes=self._causes[name],
        )
        logger.warning("%s", alarm.line())
        with suppress(OSError, DataError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_own(self._path)
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, msgspec.json.encode(alarm) + b"\n")

    def metrics(self) -> dict[str, float]:
        return self._metrics.copy()


def _metric(name: str) -> str:
    return f"alarms/{name}"


def as_alarm(line: bytes) -> Alarm | None:
    """Decodes a line of `metrics/alarms.jsonl`; None if it is no alarm."""
    try:
        return msgspec.json.decode(line, type=Alarm)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_alarms(output_dir: Path, report: Callable[[str], object] = logger.warning) -> list[Alarm]:
    """Reads the alarms of a run, each at its first ring: a resumed run rings again if the cause remains.

    Calls `report` with lines that cannot be read.
    """
    path = alarms_path(output_dir)
    first: dict[str, Alarm] = {}
    num_damaged = 0
    try:
        for _, line in read_lines(path):
            if (alarm := as_alarm(line)) is not None and len(first) < MAX_ALARMS:
                first.setdefault(alarm.name, alarm)
            elif line.endswith(b"\n") and line.strip():
                num_damaged += 1
    except (DataError, OSError) as error:
        report(str(error))
    if num_damaged:
        report(f"{path}: {num_damaged:,} lines are no alarms, or too many; they are left out")
    return list(first.values())
