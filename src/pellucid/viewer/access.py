"""Reads exports for the viewer: finished steps, and their records in columns.

Everything else in the viewer sees exports through this module only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.schema import FIELDS
from pellucid.errors import DataError
from pellucid.export import Export, Records
from pellucid.export import open as open_export
from pellucid.export.batch import ColumnBatch, is_per_token
from pellucid.export.parquet import ParquetSource
from pellucid.export.summary import StepSummary

__all__ = ["ColumnBatch", "Exports", "Records", "Selection", "StepSummary", "is_per_token", "trainable"]

FIRST_RECORDS, MOST_RECORDS = 16, 512
TOKENS_AT_ONCE = 500_000
"""Records whose columns are in memory together: a few at first, then as many as have about so many tokens."""

ALL_FIELDS = tuple(field.name for field in FIELDS)


@dataclass(frozen=True)
class Selection:
    """The records to show; None in a field: any value."""

    step: int | None = None
    rank: int | None = None
    env: str | None = None

    def __str__(self) -> str:
        named = {"step": self.step, "rank": self.rank, "environment": self.env}
        return (
            ", ".join(f"{name} {value}" for name, value in named.items() if value is not None) or "any kind"
        )

    @property
    def wanted(self) -> dict[str, Any]:
        fields = {"rank": self.rank, "env_name": self.env}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass
class Exports:
    path: Path
    selection: Selection = Selection()
    warnings: dict[str, None] = field(default_factory=dict)
    """Messages about what the reader had to leave out, each once."""

    _export: Export | None = None
    _steps: tuple[int, ...] = ()
    _matches: dict[int, bool] = field(default_factory=dict)
    """Steps that were searched for records of the selection, and whether there are any."""

    def steps(self) -> list[int]:
        """The finished steps that have records to show: looking again reads folder names, and new steps."""
        fresh = open_export(self.path, report=self.warnings.setdefault)
        if self._export is None or fresh.steps != self._steps:
            self._export, self._steps = fresh, fresh.steps
        return [step for step in self._steps if self._is_shown(step)]

    def warn(self, step: int, error: Exception) -> None:
        """Notes that a step cannot be shown."""
        self.warnings.setdefault(f"Step {step} cannot be read: {error}")

    def has(self, step: int) -> bool:
        """Whether a step can be read. Finished ones stay so: folders are looked at for others only."""
        return (step in self._steps and self._is_shown(step)) or step in self.steps()

    def _is_shown(self, step: int) -> bool:
        """Whether the selection has records of this step; one that cannot be read is left to its reader."""
        if self.selection.step not in (None, step):
            return False
        if self.selection.wanted and step not in self._matches:
            try:
                self._matches[step] = bool(self.records(step))
            except DataError:
                return True
        return self._matches.get(step, True)

    def records(self, step: int) -> Records:
        """Returns the selected records of a step, ordered by (rank, index in the rank's file)."""
        if self._export is None:
            self.steps()
        assert self._export is not None
        return self._export.records({step}, **self.selection.wanted)

    def batches(self, records: Records) -> Iterator[ColumnBatch]:
        """Yields the records in columns, some at a time."""
        start, size = 0, FIRST_RECORDS
        while start < len(records):
            batch = records[start : start + size].batch(ALL_FIELDS)
            if "token_ids" not in batch.columns:
                raise DataError(f"{self.path}: a record has no token_ids")
            yield batch
            start += size
            mean_length = max(1, batch.num_tokens // max(1, batch.num_sequences))
            size = min(MOST_RECORDS, max(1, TOKENS_AT_ONCE // mean_length))

    def is_columnar(self, records: Records) -> bool:
        """Whether some columns or records can be read without the others."""
        return all(isinstance(source, ParquetSource) for source, _ in records.files())

    def written_summary(self, step: int) -> StepSummary | None:
        """Returns the summary beside the export; None without one, or if only some records are shown."""
        is_written = any(self._folder.glob(f"step_{step}/summary.rank_*.json"))
        if self.selection.wanted or not is_written:
            return None
        if self._export is None:
            self.steps()
        assert self._export is not None
        return self._export.summary(step)

    def summary(self, step: int) -> StepSummary:
        """Returns the summary written beside the export, else one made from the records."""
        total = self.written_summary(step)
        if total is None:
            total = StepSummary()
            for batch in self.batches(self.records(step)):
                total.add(batch)
        return total

    @property
    def _folder(self) -> Path:
        """The folder that holds the step folders."""
        exports = self.path / "token_exports"
        return exports if exports.is_dir() else self.path


def trainable(batch: ColumnBatch) -> NDArray[np.bool_]:
    """Returns the loss mask; all True in an export that has none."""
    mask = batch.columns.get("loss_mask")
    if mask is None:
        return np.ones(batch.num_tokens, np.bool_)
    chosen: NDArray[np.bool_] = mask == 1
    return chosen
