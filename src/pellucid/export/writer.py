"""Writes what the loss did with every token, as JSONL, one record per sequence with a trainable token.

Values come from the loss's own record and are never derived again here. A step's file appears under its
final name when the step is complete, and `STABLE` beside it once every rank has written.

An export never stops training: on a full disk, or when its folder vanishes, it ends with one warning, takes
back what it had of the step, and counts what it leaves out from then on.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
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

logger = logging.getLogger(__name__)

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_STORED_AS = {"rewards": "reward"}
"""Fields that are a table's column under another name."""


class TokenExporter:
    def __init__(self, run_dir: Path, *, rank: int = 0, path: Path | None = None) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._path = path
        self._file: BinaryIO | None = None
        self._start: int | None = None
        """Length of the file when the step that is being written began."""
        self._num_written = 0
        self._num_due = 0
        """Sequences of this step, whether they could be written or not."""
        self._failed = False
        self.num_skipped = 0
        """Sequences without a trainable token so far: not exported, but counted."""
        self.num_lost = 0
        """Sequences so far that should have been exported and are not."""

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
        spans = list(self._exported(table))
        self._num_due += len(spans)
        records = self._records(table, observed, spans, step, micro_step, denominator)
        self._attempt(step, lambda: self._write(step, records))

    def finish(self, step: int) -> None:
        """The step is complete: its file gets its name."""
        self._attempt(step, lambda: self._complete(step))
        self.num_lost += self._num_due if self._failed else 0
        self._num_due = 0

    def forget_from(self, step: int) -> None:
        """These steps will be written again; in a file of their own they are simply replaced then."""
        self._attempt(step, lambda: self._cut_before(step))

    def forget_ranks_from(self, num_ranks: int, step: int) -> None:
        """Ranks that are no more: these steps will be written again by others."""
        for rank in self._known_ranks():
            if rank >= num_ranks:
                former = TokenExporter(self._run_dir, rank=rank, path=self._path)
                self._attempt(step, partial(former._delete_from, step))

    def close(self) -> None:
        """In the middle of a step, if at all: its file keeps its hidden name (one for all steps stays)."""
        with suppress(OSError):
            self._close_file()

    def mark_stable(self, step: int) -> None:
        """Called once, when every rank has finished the step."""
        if self._path is None:
            self._attempt(step, (self._target(step).parent / "STABLE").touch)

    def _records(
        self,
        table: TokenTable,
        observed: "Mapping[str, Tensor | None]",
        spans: Sequence[tuple[int, int, int]],
        step: int,
        micro_step: int,
        denominator: int,
    ) -> Iterator[dict[str, Any]]:
        columns = {**_table_columns(table), **_observed_columns(observed, table.num_tokens)}
        shared = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "rank": self._rank,
            "micro_step": micro_step,
            "denominator": denominator,
        }
        for index, start, stop in spans:
            values = {
                **shared,
                "micro_sequence_idx": index,
                "export_sequence_idx": self._num_written,
                **_sequence_values(table, index),
                **{name: column[start:stop] for name, column in columns.items()},
            }
            yield {field.name: values[field.name] for field in FIELDS}

    def _write(self, step: int, records: Iterator[dict[str, Any]]) -> None:
        file = self._file or self._open(step)
        for record in records:
            file.write(orjson.dumps(record, option=_OPTIONS))
            self._num_written += 1

    def _complete(self, step: int) -> None:
        if self._file is None:
            self._open(step)
        self._close_file()
        if self._path is None:
            _partial(self._target(step)).rename(self._target(step))
        self._start = None

    def _cut_before(self, step: int) -> None:
        if self._path is not None and (target := self._target(step)).exists():
            kept = [line for line in target.read_bytes().splitlines(keepends=True) if _is_before(step, line)]
            replace_file(target, b"".join(kept))

    def _known_ranks(self) -> set[int]:
        """Those that have written so far."""
        folder = self._run_dir / "token_exports"
        paths = folder.glob("step_*/rank_*.jsonl") if self._path is None else self._rank_files(self._path)
        numbers = (path.name.removesuffix(path.suffix).rpartition("rank_")[2] for path in paths)
        return {int(number) for number in numbers if number.isdigit()}

    def _rank_files(self, path: Path) -> Iterator[Path]:
        return path.parent.glob(f"{path.stem}.rank_*{path.suffix or '.jsonl'}")

    def _delete_from(self, step: int) -> None:
        self._cut_before(step)
        if self._path is None:
            for path in (self._run_dir / "token_exports").glob(f"step_*/rank_{self._rank}.jsonl"):
                if int(path.parent.name.removeprefix("step_")) >= step:
                    path.unlink()

    def _attempt(self, step: int, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except OSError as error:
            self._failed = True
            self._take_back(step)
            logger.warning(
                "the token export ends with step %d: %s; training goes on without it, and "
                "export/lost_sequences counts what is left out",
                step,
                error,
            )

    def _take_back(self, step: int) -> None:
        """Half a step is of no use, and its space may be needed."""
        self.close()
        with suppress(OSError):
            if self._path is None:
                _partial(self._target(step)).unlink()
            elif self._start is not None:
                os.truncate(self._target(step), self._start)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

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
        self._start = self._file.tell()
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
