"""Reads token exports back: one record per sequence, ordered by (step, rank, export_sequence_idx).

    outputs/demo/                       a run folder            finished steps only
    outputs/demo/token_exports/         its exports             finished steps only
    outputs/demo/token_exports/step_7/  one step                read even without its STABLE marker
    any/where/rank_0.jsonl              one file, or .parquet
    any/where/                          step folders of another trainer, which has no STABLE; files in folders

Records that lie elsewhere (`trainer.experimental.token_export.path`) are found by the links of their steps.

Records carry the columns of the export format, fewer where the writer had fewer. The older form, a list of
objects under `tokens`, comes out in the same columns. A shape that is neither is an error with file and
line; so is an input without records. What is torn or damaged is reported and left out.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pellucid.data.files import read_whole, require_file, step_number
from pellucid.data.schema import FIELD_BY_NAME, FIELDS, Column, TrainingMode
from pellucid.data.table import TokenTable, Values
from pellucid.errors import DataError
from pellucid.export.jsonl import JsonlSource
from pellucid.export.parquet import ParquetSource, require, to_arrow
from pellucid.export.paths import FOLDER, LINK, MARKER, RUN_PARTS, RankFile
from pellucid.export.summary import NEEDED, StepSummary

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
_STEPS_KEPT_OPEN = 64

RecordSource = JsonlSource | ParquetSource

Wanted = Any
"""A value, a collection of values, or a function that says whether a value is wanted."""

RATIOS: Mapping[str, Callable[[Values, Values], Values]] = {
    "log_importance_ratio": lambda trainer, inference: trainer - inference,
    "importance_ratio": lambda trainer, inference: np.exp(trainer - inference),
    "mismatch_kl": lambda trainer, inference: np.expm1(trainer - inference) - (trainer - inference),
    "prob_delta": lambda trainer, inference: np.exp(trainer) - np.exp(inference),
}
"""Fields that follow from the logprobs of trainer and inference; as the loss has them, but for rounding."""

_LOGPROBS = ("trainer_logprobs", "inference_logprobs")


def _sources(name: str) -> tuple[str, ...]:
    """Returns the fields that have to be read to derive this one."""
    if name in RATIOS:
        return (*_LOGPROBS, "training_mode")
    stand_in = FIELD_BY_NAME[name].stand_in
    return () if stand_in is None else (stand_in,)


def _derive(table: TokenTable, name: str) -> Values:
    """Computes a derivable field that a file leaves out. Samples of sft have no ratios: null."""
    if name == "position_ids":
        return table.positions()
    if name not in RATIOS:
        return table.dense(name)
    with np.errstate(over="ignore"):
        values = RATIOS[name](*(table[each] for each in _LOGPROBS))
    if "training_mode" in table:
        values[table.dense("training_mode") == TrainingMode.SFT.value] = np.nan
    return values


def read_columns(source: RecordSource, rows: Sequence[int], names: Sequence[str]) -> TokenTable:
    """Reads columns of some rows; derives those that are not stored, or leaves them out."""
    table = source.batch(rows, names)
    columns = {name: table.columns[name] for name in names if name in table}
    derived = [
        name
        for name in names
        if name not in columns and name in FIELD_BY_NAME and FIELD_BY_NAME[name].derivable
    ]
    if not derived:
        return TokenTable.of_rows(table.lengths, columns)
    needed = source.batch(rows, list({other: None for name in derived for other in _sources(name)}))
    added = {
        name: _derive(needed, name)
        for name in derived
        if set(_sources(name)) - {"training_mode"} <= needed.columns.keys()
    }
    return TokenTable(table.lengths, {**columns, **added})


@dataclass(frozen=True, slots=True, eq=False)
class Record(Mapping[str, Any]):
    """One sequence; a field is read when it is first asked for.

    Per-token fields are arrays: null is NaN, and a mask that the loss does not have (sft has no trust region)
    is None. Fields that follow from others are there even if the file leaves them out.
    """

    source: RecordSource
    row: int
    key: tuple[int, ...]
    """(step, rank, export_sequence_idx)."""

    @property
    def num_tokens(self) -> int:
        return len(self["token_ids"])

    def __getitem__(self, name: str) -> Any:
        return self._read([name], _mask_or_none)[name]

    def __iter__(self) -> Iterator[str]:
        stored = self.source.names(self.row)
        yield from stored
        for field in FIELDS:
            if field.derivable and field.name not in stored and set(_sources(field.name)) <= set(stored):
                yield field.name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def arrays(self) -> dict[str, Any]:
        """All fields at once, as `record[name]` has them."""
        return self._read(list(self), _mask_or_none)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, null as None: what the JSONL has."""
        return self._read(list(self), lambda name, values: _plain(values))

    def _read(self, names: Sequence[str], present: Callable[[str, Values], Any]) -> dict[str, Any]:
        table = read_columns(self.source, [self.row], names)
        return {
            name: present(name, table[name]) if table.is_per_token(name) else _scalar(table[name])
            for name in table.columns
        }


class Records(Sequence[Record]):
    """Some records, in the order of (step, rank, index). Nothing is read before it is asked for."""

    def __init__(self, entries: Sequence[tuple[RecordSource, int]]) -> None:
        self._entries = entries

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> "Records": ...

    def __getitem__(self, index: int | slice) -> "Record | Records":
        if isinstance(index, slice):
            return Records(self._entries[index])
        source, row = self._entries[index]
        return Record(source, row, source.keys[row])

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[tuple[int, ...]]:
        """Returns (step, rank, export_sequence_idx) of each record."""
        return [source.keys[row] for source, row in self._entries]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each record."""
        return self.batch([]).lengths

    def column(self, name: str) -> Values:
        """A per-token field of all records end to end, or a per-sequence field with one value per record.

        In floats null is NaN; a mask is False where a loss has none.
        """
        batch = self.batch([name])
        field = FIELD_BY_NAME.get(name)
        if not self and field is not None:
            return np.empty(0, field.array_dtype)
        if name not in batch:
            raise DataError(f"not every one of the {len(self)} records has {name}, and it cannot be derived")
        values = batch[name]
        return values == 1 if field is not None and field.dtype is np.bool_ else values

    def batch(self, names: Sequence[str]) -> TokenTable:
        """Returns those of these columns that all records have."""
        return TokenTable.concat([read_columns(source, rows, names) for source, rows in self.files()])

    def where(self, **wanted: Wanted) -> "Records":
        """Those whose per-sequence fields are as wanted: a value, one of several, or as a function says.

            records.where(env_name="math", training_mode={"rl", "opd"}, reward=lambda reward: reward > 0)

        Only these fields are read.
        """
        for name in wanted:
            if name not in FIELD_BY_NAME or FIELD_BY_NAME[name].per_token:
                known = ", ".join(field.name for field in FIELDS if not field.per_token)
                raise DataError(f"where({name}=…): not a field of a sequence; those are {known}")
        kept = np.ones(len(self), np.bool_)
        for name, value in wanted.items():
            kept &= np.fromiter(map(_test(value), self.column(name)), np.bool_, len(self))
        return Records([self._entries[index] for index in np.flatnonzero(kept).tolist()])

    def fields(self) -> tuple[Column, ...]:
        """Those of the schema that all records have, stored or derived."""
        firsts = {source: index for index, (source, _) in reversed(list(enumerate(self._entries)))}
        names = set.intersection(*(set(self[index]) for index in firsts.values())) if self else set()
        return tuple(field for field in FIELDS if field.name in names)

    def files(self) -> Iterator[tuple[RecordSource, list[int]]]:
        """Yields the rows of each file, in order."""
        for source, members in groupby(self._entries, key=lambda entry: entry[0]):
            yield source, [row for _, row in members]

    def whole_parquet_files(self) -> list[str] | None:
        """Returns their paths, if the records are all there is in Parquet files that leave out nothing."""
        files = []
        for source, rows in self.files():
            if (
                not isinstance(source, ParquetSource)
                or source.num_damaged
                or rows != list(range(len(source.keys)))
                or any(field.derivable and field.name not in source.columns for field in FIELDS)
            ):
                return None
            files.append(str(source.path))
        return files

    def arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pyarrow.Table` with one row per record; per-token fields are lists."""
        require("pyarrow", "arrow()")
        for name in columns or ():
            if name not in FIELD_BY_NAME:
                raise DataError(f"arrow(columns=…): {name!r} is not a field; see docs/read-an-export.md")
        chosen = self.fields() if columns is None else [FIELD_BY_NAME[name] for name in columns]
        batch = self.batch([field.name for field in chosen])
        return to_arrow(batch, [field for field in chosen if field.name in batch])

    def pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `pandas.DataFrame` with one row per record; per-token fields are arrays."""
        require("pandas", "pandas()")
        return self.arrow(columns).to_pandas()

    def polars(self, columns: Sequence[str] | None = None) -> Any:
        """Returns a `polars.DataFrame` with one row per record; per-token fields are lists."""
        return require("polars", "polars()").from_arrow(self.arrow(columns))

    def duckdb(self) -> Any:
        """A DuckDB connection with the views `sequences`, a row per record, and `tokens`, a row per token.

        DuckDB reads whole Parquet files itself, so that a query over a long run takes the columns and row
        groups that it needs. Any other selection goes through Arrow, in memory.
        """
        connection = require("duckdb", "duckdb()").connect()
        if (files := self.whole_parquet_files()) is not None:
            names = ", ".join(f"'{file.replace(chr(39), chr(39) * 2)}'" for file in files)
            connection.execute(
                f"CREATE VIEW sequences AS SELECT * FROM read_parquet([{names}], union_by_name = true)"
            )
            stored = {row[0] for row in connection.execute("DESCRIBE sequences").fetchall()}
        else:
            table = self.arrow()
            connection.register("sequences", table)
            stored = set(table.schema.names)
        known = [field for field in FIELDS if field.name in stored]
        sequence = [field.name for field in known if not field.per_token]
        token = [f"unnest({field.name}) AS {field.name}" for field in known if field.per_token]
        place = "unnest(range(len(token_ids))) AS token"
        shown = ", ".join([*sequence, place, *token])
        connection.execute(f"CREATE VIEW tokens AS SELECT {shown} FROM sequences")
        return connection


def open(path: Path | str, *, report: Callable[[str], object] = log.warning) -> "Export":
    """Opens the exports below `path`. `report` gets each problem once; `problems` keeps them."""
    return Export(Path(path), report)


class Export:
    """The exports below a path; files are opened when their step is first asked for.

    Open a running run again to see its new steps: that reads nothing but folder names.
    """

    def __init__(self, path: Path, report: Callable[[str], object] = log.warning) -> None:
        self.path = path
        self.problems: list[str] = []
        """Messages about torn or damaged parts that were left out of the files opened so far."""

        self._report = report
        self._folders = _step_folders(path)
        self._sources = lru_cache(_STEPS_KEPT_OPEN)(self._open_step)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be read, ascending."""
        if self._folders is not None:
            return tuple(self._folders)
        return tuple(sorted({key[0] for source in self._sources(None) for key in source.keys}))

    def step(self, number: int) -> Records:
        return self.records({number})

    def records(self, steps: Collection[int] | None = None, **wanted: Wanted) -> Records:
        """All records, or those of some steps; `wanted` as in `Records.where`."""
        entries: list[tuple[RecordSource, int]] = []
        for step in self._folders if self._folders is not None else (None,):
            if step is None or steps is None or step in steps:
                found = [
                    (key, number, row, source)
                    for number, source in enumerate(self._sources(step))
                    for row, key in enumerate(source.keys)
                    if steps is None or key[0] in steps
                ]
                entries += [(source, row) for *_, row, source in sorted(found, key=lambda entry: entry[:3])]
        records = Records(entries)
        return records.where(**wanted) if wanted else records

    def summary(self, step: int) -> StepSummary:
        """Returns the summary of a step; makes it from the records where none is written, or an old one."""
        total = StepSummary()
        folder = None if self._folders is None else self._folders.get(step)
        paths = [] if folder is None else [file.summary for file in _rank_files(folder)]
        written = [summary for path in paths if (summary := self._written_summary(path)) is not None]
        if paths and len(written) == len(paths):
            for summary in written:
                total.merge(summary)
        else:
            for source, rows in self.step(step).files():
                total.add(read_columns(source, rows, NEEDED))
        return total

    def _written_summary(self, path: Path) -> StepSummary | None:
        """None where there is none, or an older one; one that is damaged is reported, too."""
        try:
            return StepSummary.from_json(read_whole(path)) if path.exists() else None
        except (DataError, OSError) as error:
            self._note(f"{path} is damaged ({error}); its numbers are counted anew from the records")
            return None

    def _open_step(self, step: int | None) -> list[RecordSource]:
        if step is None:
            files = [RankFile.at(self.path)] if self.path.is_file() else _rank_files(self.path)
        else:
            assert self._folders is not None
            files = _rank_files(self._folders[step])
        return [_open_source(file, self._note) for file in files]

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
            self._report(problem)


def read_records(
    path: Path,
    steps: Collection[int] | None = None,
    *,
    report: Callable[[str], object] = log.warning,
) -> Iterator[dict[str, Any]]:
    """Yields the records below `path` as plain lists and numbers, one by one; at least one."""
    records = open(path, report=report).records(steps)
    if not records:
        which = "" if steps is None else f" of the steps {sorted(steps)}"
        raise DataError(f"{path} holds no token-export records{which}")
    for record in records:
        yield record.as_dict()


def _open_source(file: RankFile, report: Callable[[str], object]) -> RecordSource:
    require_file(file.path)
    if file.path.suffix == ".parquet":
        return ParquetSource(file.path, report)
    return JsonlSource(file.path, report, file.span)


def _step_folders(path: Path) -> dict[int, Path] | None:
    """Returns the finished steps of a folder, in order; None for a step folder or a file."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path}: expected a .jsonl or .parquet file, got {path.suffix or 'no suffix'}")
        return None
    if not path.is_dir():
        raise DataError(
            f"{path} does not exist; give a run, token_exports or step folder, or a .jsonl or .parquet file"
        )
    exports = path / FOLDER if (path / FOLDER).is_dir() else path
    numbers = sorted(_step_numbers(exports))
    if not numbers:
        _rank_files(path)
        return None
    finished = {
        number: exports / f"step_{number}"
        for number in numbers
        if os.path.exists(f"{exports}/step_{number}/{MARKER}")  # of a long run these are thousands
    }
    if not finished and not any((exports.parent / part).is_dir() for part in RUN_PARTS):
        finished = {number: exports / f"step_{number}" for number in numbers}  # another trainer's
    if not finished:
        raise DataError(
            f"{exports} has {len(numbers)} steps, none of them finished (no {MARKER} marker); "
            f"name a step folder such as {exports / f'step_{numbers[0]}'} to read it as it is"
        )
    return finished


def _step_numbers(exports: Path) -> Iterator[int]:
    with os.scandir(exports) as entries:
        for entry in entries:
            if (number := step_number(entry.name)) is not None and entry.is_dir():
                yield number


def _rank_files(folder: Path) -> list[RankFile]:
    files = sorted(path for suffix in (*SUFFIXES, LINK) for path in folder.glob(f"*{suffix}"))
    if not files:
        nested = (path for suffix in SUFFIXES for path in folder.rglob(f"*{suffix}"))
        files = sorted(path for path in nested if not {*path.relative_to(folder).parts} & {*RUN_PARTS})
    if not files:
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder} holds no .jsonl or .parquet token export; expected rank_R.jsonl, found {present}"
        )
    return [RankFile.at(path) for path in files]


def _test(wanted: Wanted) -> Callable[[Any], bool]:
    if callable(wanted):
        return lambda value: bool(wanted(value))
    if isinstance(wanted, Collection) and not isinstance(wanted, str | bytes):
        return wanted.__contains__
    return lambda value: bool(value == wanted)


def _mask_or_none(name: str, values: Values) -> Values | None:
    if name not in FIELD_BY_NAME or FIELD_BY_NAME[name].dtype is not np.bool_ or values.dtype == np.bool_:
        return values
    return None if np.isnan(values).all() else values == 1


def _scalar(values: Values) -> Any:
    value = values[0]
    if isinstance(value, np.generic):
        value = value.item()
    return None if value != value else value  # NaN is null


def _plain(values: Values) -> list[Any]:
    listed: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        for index in np.flatnonzero(~np.isfinite(values)).tolist():
            listed[index] = None
    return listed
