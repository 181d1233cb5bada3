"""Alarms of a run in `metrics/alarms.jsonl`: each process writes a line when one of its alarms first rings.

The file is not trusted: lines that are no alarms are reported and left out.
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
