"""What the viewer reads of an export: steps, and the records of a step as columns of numbers.

Everything else in the viewer sees exports through this module only.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.errors import DataError
from pellucid.export.reader import TOKEN_COLUMNS, read_records

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Record:
    """One sequence: what is said of it as a whole, and its columns; null is NaN."""

    fields: Mapping[str, Any]
    columns: Mapping[str, NDArray[Any]]

    @property
    def num_tokens(self) -> int:
        return len(self.columns["token_ids"])

    @property
    def step(self) -> int:
        return int(self.fields.get("step") or 0)

    @property
    def env(self) -> str:
        return str(self.fields.get("env_name") or "")

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """Where the loss mask is set; everywhere in a record that has none."""
        mask = self.columns.get("loss_mask")
        if mask is None:
            return np.ones(self.num_tokens, np.bool_)
        trainable: NDArray[np.bool_] = mask == 1
        return trainable

    def overall(self, field_name: str, column: str) -> float:
        """A value of the whole record, else the mean of its column over trainable tokens, else NaN."""
        if isinstance(value := self.fields.get(field_name), int | float):
            return float(value)
        values = self.columns.get(column)
        if values is None:
            return np.nan
        known = values[self.trainable & np.isfinite(values)]
        return float(known.mean()) if len(known) else np.nan


@dataclass(frozen=True)
class Selection:
    """Which records are shown at all."""

    step: int | None = None
    rank: int | None = None
    env: str | None = None

    def takes(self, fields: Mapping[str, Any]) -> bool:
        return (
            (self.step is None or fields.get("step", 0) == self.step)
            and (self.rank is None or fields.get("rank", 0) == self.rank)
            and (self.env is None or fields.get("env_name") == self.env)
        )


@dataclass
class Exports:
    path: Path
    selection: Selection = Selection()
    warnings: dict[str, None] = field(default_factory=dict)
    """What the reader had to leave out, each once."""

    def steps(self) -> list[int]:
        """The finished steps there are now; of a step folder or a file, those that its records name."""
        folder = self._steps_folder
        if folder is None:
            found = self._steps_of_file
        else:
            numbers = (path.parent.name.removeprefix("step_") for path in folder.glob("step_*/STABLE"))
            found = sorted(int(number) for number in numbers if number.isdecimal())
        return [step for step in found if self.selection.step in (None, step)]

    def records(self, step: int) -> Iterator[Record]:
        """In the order of their addresses: (rank, index in the rank's file)."""
        for raw in read_records(self.path, [step], report=self.warnings.setdefault):
            if self.selection.takes(raw):
                yield _as_record(raw)

    @cached_property
    def _steps_folder(self) -> Path | None:
        if not self.path.is_dir():
            return None
        exports = self.path / "token_exports"
        folder = exports if exports.is_dir() else self.path
        return folder if any(folder.glob("step_*")) else None

    @cached_property
    def _steps_of_file(self) -> list[int]:
        found = read_records(self.path, report=self.warnings.setdefault)
        return sorted({record.get("step", 0) for record in found})


def _as_record(raw: Mapping[str, Any]) -> Record:
    columns = {
        name: _numbers(raw, name)
        for name in TOKEN_COLUMNS
        if isinstance(raw.get(name), list) or name == "token_ids"
    }
    fields = {name: value for name, value in raw.items() if name not in columns}
    return Record(fields, columns)


def _numbers(raw: Mapping[str, Any], name: str) -> NDArray[Any]:
    try:
        if name == "token_ids":
            return np.array(raw[name], np.int64)
        return np.array(raw[name], np.float64)
    except (TypeError, ValueError) as error:
        where = f"step {raw.get('step', 0)}, rank {raw.get('rank', 0)}"
        index = raw.get("export_sequence_idx", 0)
        raise DataError(f"record {index} of {where}: {name} is not a list of numbers: {error}") from error
