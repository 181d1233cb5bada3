"""Recorded against recomputed: how many values differ, and which one is the first."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pellucid.checks.finding import Finding
from pellucid.export.batch import ColumnBatch, Values

Name = Callable[[int], str]
"""From the index of a value to what it is called."""


@dataclass(slots=True)
class Comparison:
    """One field, over any number of steps."""

    check: str
    column: str
    tolerance: float
    """Absolute, and relative to the recorded value."""

    of: str = "tokens"
    hint: str = ""
    """Advice where to look if they differ."""

    num_compared: int = 0
    num_different: int = 0
    first: str | None = None
    steps: list[int] = field(default_factory=list)

    def add(
        self, step: int, recorded: Values, recomputed: Values, name: Name, *, within: Values | None = None
    ) -> None:
        """Both with NaN for null; what is not finite is null in an export. `within`: a bound for each value,
        in place of the tolerance."""
        self.steps.append(step)
        self.num_compared += len(recorded)
        own, other = (np.where(np.isfinite(v), v, np.nan) for v in (recorded, recomputed))
        allowed = self.tolerance * (1 + np.abs(own)) if within is None else within
        close = np.abs(own - other) <= allowed
        different = np.flatnonzero(~(close | (np.isnan(own) & np.isnan(other))))
        self.num_different += len(different)
        if self.first is None and len(different):
            index = int(different[0])
            self.first = (
                f"step {step}, {name(index)}: recorded {_shown(own[index])}, "
                f"recomputed {_shown(other[index])}"
                + ("" if within is None else f", rounding explains {within[index]:.2g}")
            )

    def finding(self) -> Finding:
        what = f"{self.column} of {self.num_compared:,} {self.of}: those that differ"
        return Finding(self.check, what, self.num_different, 0, f"first: {self.first}. {self.hint}".strip())


def token_name(step: ColumnBatch) -> Name:
    """`rank 0, sequence 3 (rollout a1), token 17`."""

    def name(token: int) -> str:
        row = int(step.owners[token])
        return f"{record_name(step, row)}, token {token - int(step.offsets[row])}"

    return name


def record_name(step: ColumnBatch, row: int) -> str:
    columns = step.columns
    rank = int(columns["rank"][row]) if "rank" in columns else 0
    index = int(columns["export_sequence_idx"][row]) if "export_sequence_idx" in columns else row
    rollout = columns["rollout_id"][row] if "rollout_id" in columns else None
    return f"rank {rank}, sequence {index}" + (f" (rollout {rollout})" if rollout else "")


def _shown(value: float) -> str:
    return "null" if np.isnan(value) else f"{value:.9g}"
