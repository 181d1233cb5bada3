"""Writes what the loss did with every token, as JSONL, one record per sequence with a trainable token.

Values come from the loss's own record and are never derived again here. A step's file appears under its
final name when the step is complete, and `STABLE` beside it once every rank has written.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from pellucid.data import COLUMNS, Stored, TokenTable
from pellucid.data.files import replace_file
from pellucid.export.schema import FIELDS, SCHEMA_VERSION

if TYPE_CHECKING:
    from torch import Tensor

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_STORED_AS = {"rewards": "reward"}
"""Fields that are a table's column under another name."""


class TokenExporter:
    def __init__(self, run_dir: Path, *, rank: int = 0, path: Path | None = None) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._path = path
        self._file: BinaryIO | None = None
        self._num_written = 0
        self.num_skipped = 0
        """Sequences without a trainable token so far: not exported, but counted."""

    def add(
        self,
        table: TokenTable,
        observed: "Mapping[str, Tensor | None]",
        *,
        step: int,
        micro_step: int,
        denominator: int,
    ) -> None:
        """One micro batch; `observed` are the per-token values of forward and loss, None where absent."""
        file = self._file or self._open(step)
        columns = {**_table_columns(table), **_observed_columns(observed, table.num_tokens)}
        shared = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "rank": self._rank,
            "micro_step": micro_step,
            "denominator": denominator,
        }
        for index, start, stop in self._exported(table):
            values = {
                **shared,
                "micro_sequence_idx": index,
                "export_sequence_idx": self._num_written,
                **_sequence_values(table, index),
                **{name: column[start:stop] for name, column in columns.items()},
            }
            record = {field.name: values[field.name] for field in FIELDS}
            file.write(orjson.dumps(record, option=_OPTIONS))
            self._num_written += 1

    def finish(self, step: int) -> None:
        """The step is complete: its file gets its name."""
        if self._file is None:
            self._open(step)
        self.close()
        if self._path is None:
            _partial(self._target(step)).rename(self._target(step))

    def forget_from(self, step: int) -> None:
        """These steps will be written again; in a file of their own they are simply replaced then."""
        if self._path is not None and (target := self._target(step)).exists():
            kept = [line for line in target.read_bytes().splitlines(keepends=True) if _is_before(step, line)]
            replace_file(target, b"".join(kept))

    def close(self) -> None:
        """In the middle of a step, if at all: its file keeps its hidden name (one for all steps stays)."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def mark_stable(self, step: int) -> None:
        """Called once, when every rank has finished the step."""
        if self._path is None:
            (self._target(step).parent / "STABLE").touch()

    def _exported(self, table: TokenTable) -> Iterator[tuple[int, int, int]]:
        offsets = table.token_offsets
        for index in range(table.num_sequences):
            start, stop = int(offsets[index]), int(offsets[index + 1])
            if table["loss_mask"][start:stop].any():
                yield index, start, stop
            elif table["env_name"][index]:
                self.num_skipped += 1

    def _open(self, step: int) -> BinaryIO:
        target = self._target(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = target.open("ab") if self._path is not None else _partial(target).open("wb")
        self._num_written = 0
        return self._file

    def _target(self, step: int) -> Path:
        if self._path is not None:
            return self._path.with_name(f"{self._path.stem}.rank_{self._rank}{self._path.suffix or '.jsonl'}")
        return self._run_dir / "token_exports" / f"step_{step}" / f"rank_{self._rank}.jsonl"


def _is_before(step: int, line: bytes) -> bool:
    """False for a torn line, too."""
    return line.endswith(b"\n") and orjson.loads(line)["step"] < step


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _table_columns(table: TokenTable) -> dict[str, NDArray[Any]]:
    columns = {"position_ids": table.positions()}
    for field in FIELDS:
        name = _STORED_AS.get(field.name, field.name)
        if field.per_token and name in COLUMNS:
            columns[field.name] = np.ascontiguousarray(table.dense(name))
    return columns


def _observed_columns(observed: "Mapping[str, Tensor | None]", num_tokens: int) -> dict[str, NDArray[Any]]:
    absent = np.full(num_tokens, np.nan, np.float32)
    return {
        name: absent if values is None else values.detach().cpu().numpy() for name, values in observed.items()
    }


def _sequence_values(table: TokenTable, index: int) -> dict[str, Any]:
    values = {
        field.name: table[field.name][index]
        for field in FIELDS
        if not field.per_token and field.name in COLUMNS and COLUMNS[field.name].stored is Stored.SEQUENCES
    }
    if table.has("advantages"):
        values["advantage"] = None
    return values
