"""Alarms of a run as `metrics/alarms.jsonl` has them: a line each, written once per process that rang it.

The file may be anybody's: a line that is no alarm is reported and left out, whatever it holds.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from pellucid.data.files import read_lines
from pellucid.data.plain import printable
from pellucid.errors import DataError

logger = logging.getLogger(__name__)

CHANCE = 1e-6
"""The probability that a test rings in a sound run, in all of its steps together."""

MAX_ALARMS = 32
"""Alarms that are read of a run; there are fewer kinds."""

_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Words = Annotated[str, msgspec.Meta(max_length=4096)]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    name: _Name
    step: _Step
    """At which it rang first; of the orchestrator's, the step of the batch that was being sampled."""

    statistic: _Words
    """What is measured, in words."""

    value: float | None
    """None in a file: a number that is not finite."""

    threshold: float
    p_value: float | None = None
    """None: it is no test, and nothing of it is due to chance."""

    example: _Words = ""
    """The first one that was seen."""

    causes: _Words
    """What brings this about, and what to do."""

    def line(self) -> str:
        return _one_line(f"ALARM {self.name} at step {self.step}: {self.finding()}. {self.causes}")

    def finding(self) -> str:
        """What was seen, against which threshold."""
        p_value = "" if self.p_value is None else f", p = {self.p_value:.2g} < {CHANCE:g}"
        value = "not finite" if self.value is None or not math.isfinite(self.value) else f"{self.value:.4g}"
        example = f"; first seen: {self.example}" if self.example else ""
        return _one_line(f"{self.statistic}: {value} (threshold {self.threshold:.4g}{p_value}){example}")


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n"))


def alarms_path(output_dir: Path) -> Path:
    return output_dir / "metrics" / "alarms.jsonl"


def as_alarm(line: bytes) -> Alarm | None:
    """Decodes a line of `metrics/alarms.jsonl`; None if it is no alarm."""
    try:
        return msgspec.json.decode(line, type=Alarm)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_alarms(output_dir: Path, report: Callable[[str], object] = logger.warning) -> list[Alarm]:
    """Reads the alarms of a run, each at its first ring: a resumed run rings again what was not put right.

    `report` is told what cannot be read.
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
