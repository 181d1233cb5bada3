"""Reads what is shown: the finished steps of an export, its records in columns, and the run folder around it.

Everything else in the viewer sees exports and run folders through this module only.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data import TokenTable
from pellucid.data.alarms import Alarm, alarms_path, read_alarms
from pellucid.data.files import OUTCOME
from pellucid.data.schema import FIELDS
from pellucid.errors import DataError, PellucidError
from pellucid.export import Export, Records
from pellucid.export import open as open_export
from pellucid.export.dumps import Dump, find_dump
from pellucid.export.foreign import number_in
from pellucid.export.jsonl import read_json_lines
from pellucid.export.parquet import ParquetSource
from pellucid.export.paths import FOLDER, RUN_PARTS
from pellucid.export.summary import StepSummary
from pellucid.ledger import State, reconcile
from pellucid.ledger.settings import read_settings_file, settings_files
from pellucid.viewer.rollouts import SavedRollouts
from pellucid.viewer.summary_cache import SummaryCache
from pellucid.viewer.timeline import Timeline, read_timeline

__all__ = ["Exports", "Records", "RunFolder", "Selection", "StepSummary"]

FIRST_RECORDS, MOST_RECORDS = 16, 512
TOKENS_AT_ONCE = 500_000
"""Records whose columns are in memory together: a few at first, then as many as have about so many tokens."""

ALL_FIELDS = tuple(field.name for field in FIELDS)

WRITES_WITHIN_S = 120.0
"""A run whose files are older than this is not being written."""

MAX_NAME = 200
"""Characters of a metric's or an environment's name; what is longer is nobody's name."""


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

    dump: Dump | None = None
    """Rollouts of another system at `path`; they may have tokens, too."""

    _export: Export | None = None
    _is_text: bool = False
    """Whether the dump has no tokens."""

    _steps: tuple[int, ...] = ()
    _cache: SummaryCache = field(default_factory=SummaryCache)
    _matches: dict[int, bool] = field(default_factory=dict)
    """Steps that were searched for records of the selection, and whether there are any."""

    def __post_init__(self) -> None:
        self.dump = None if is_run(self.path) else find_dump(self.path)
        self._is_text = self.dump is not None and not self.dump.has_tokens()

    def steps(self) -> list[int]:
        """The finished steps that have records to show: looking again reads folder names, and new steps."""
        if self._export is None and self.lacks_tokens():
            return []
        fresh = open_export(self.path, report=self.warnings.setdefault)
        if self._export is None or fresh.steps != self._steps:
            self._export, self._steps = fresh, fresh.steps
        return [step for step in self._steps if self._is_shown(step)]

    def lacks_tokens(self) -> bool:
        """Whether this is a run folder without a finished step of an export, or a dump of texts."""
        if not is_run(self.path):
            return self._is_text
        others = [part for part in RUN_PARTS if (self.path / part).is_dir()]
        exports = self.path / FOLDER
        return not any(exports.glob("step_*/STABLE")) and (bool(others) or not any(exports.glob("step_*")))

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

    def _opened(self) -> Export:
        if self._export is None:
            self.steps()
        assert self._export is not None
        return self._export

    def records(self, step: int) -> Records:
        """Returns the selected records of a step, ordered by (rank, index in the rank's file)."""
        return self._opened().records({step}, **self.selection.wanted)

    def batches(self, records: Records) -> Iterator[TokenTable]:
        """Yields the records in columns, some at a time."""
        start, size = 0, FIRST_RECORDS
        while start < len(records):
            batch = records[start : start + size].batch(ALL_FIELDS)
            if "token_ids" not in batch:
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
        exports = self.path / "token_exports"
        folder = exports if exports.is_dir() else self.path
        is_written = any(folder.glob(f"step_{step}/summary.rank_*.json"))
        return self._opened().summary(step) if is_written and not self.selection.wanted else None

    def known_summary(self, step: int) -> StepSummary | None:
        """Returns the summary beside the export, or the one that an earlier look at it left in the cache."""
        found = self.written_summary(step)
        if found is None and (files := self._whole_files(step)):
            found = self._cache.get(files)
        return found

    def keep_summary(self, step: int, summary: StepSummary) -> None:
        """Keeps the summary of a step for the next look."""
        if files := self._whole_files(step):
            self._cache.put(files, summary)

    def _whole_files(self, step: int) -> list[Path]:
        """Returns the files of a step that hold nothing else; none where only some records are shown."""
        if self.selection.wanted:
            return []
        sources = list(self.records(step).files())
        is_whole = all(len(rows) == len(source.keys) for source, rows in sources)
        return [source.path for source, _ in sources] if is_whole else []

    def has_masks(self, summary: StepSummary, records: Records) -> bool:
        """Whether the records say which tokens were masked: one was, or the first ones say that none was."""
        is_any = any(part.counts["masked"] for part in summary.parts)
        return is_any or has_masks(records[:FIRST_RECORDS].batch(("is_masked",)))

    def summary(self, step: int) -> StepSummary:
        """Returns the summary written beside the export, else one made from the records."""
        total = self.known_summary(step)
        if total is None:
            total = StepSummary()
            for batch in self.batches(self.records(step)):
                total.add(batch)
            self.keep_summary(step, total)
        return total


def has_masks(batch: TokenTable) -> bool:
    """Whether the records say which tokens the trust region masked."""
    masks = batch.get("is_masked")
    if masks is None or masks.dtype.kind != "O":
        return masks is not None and bool((masks == masks).any())
    return any(value is not None for value in masks)


def is_run(folder: Path) -> bool:
    """Whether a folder has a part of a run. A Python package of that name is none: `src/pellucid/ledger`."""
    parts = (folder / part for part in (*RUN_PARTS, FOLDER))
    return any(part.is_dir() and next(part.glob("*.py"), None) is None for part in parts)


def trainable(batch: TokenTable) -> NDArray[np.bool_]:
    """Returns the loss mask; all True in an export that has none."""
    mask = batch.get("loss_mask")
    if mask is None:
        return np.ones(batch.num_tokens, np.bool_)
    chosen: NDArray[np.bool_] = mask == 1
    return chosen


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run folder. Files that cannot be read are left out, and named once in `problems`."""

    folder: Path | None
    """None for exports that lie outside a run folder."""

    problems: dict[str, None] = field(default_factory=dict)
    dump: Dump | None = None
    """Rollouts of another system that lie outside a run folder, or one file of them."""

    @classmethod
    def of(cls, exports: "Exports") -> "RunFolder":
        """Returns the run that the exports are, or are part of, with the dump that they are."""
        return replace(cls.around(exports.path), dump=exports.dump)

    @classmethod
    def around(cls, path: Path) -> "RunFolder":
        """Returns the run that `path` is, or is part of."""
        if is_run(path):
            return cls(path)
        for parent in (path, *path.parents):
            if parent.name in (*RUN_PARTS, FOLDER):
                return cls(parent.parent)
        return cls(None)

    @property
    def kind(self) -> str:
        """`sft` or `rl`: which command made the run."""
        is_sft = self.folder is not None and (self.folder / "configs" / "sft.toml").exists()
        return "sft" if is_sft else "rl"

    def rollouts(self) -> SavedRollouts:
        lengths = [
            _section(_section(config, "trainer"), "model").get("seq_len")
            for config in self._configs()
            if "trainer" in config
        ]
        seq_len = next((length for length in reversed(lengths) if type(length) is int), None)
        return SavedRollouts(self.folder, seq_len, self.dump)

    def written_at(self) -> float:
        """Returns when one of the run's files changed last, in seconds since 1970; 0 where there are none."""
        if self.folder is None:
            return 0.0
        places = [self.folder / part for part in (*RUN_PARTS, FOLDER)]
        files = [*self._files("metrics", "*"), *self._files("ledger", "*"), *self._files("logs", "*")]
        times = [0.0]
        for path in (*places, *files):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def is_being_written(self, now: float) -> bool:
        written_at = self.written_at()
        return now - written_at < WRITES_WITHIN_S and self._ended_at() < written_at

    def _ended_at(self) -> float:
        """Returns when the run noted how it ended; 0.0 for one that did not."""
        with suppress(OSError):
            outcome = (self.folder / OUTCOME).stat() if self.folder is not None else None
            return outcome.st_mtime if outcome is not None and outcome.st_size else 0.0
        return 0.0

    def state(self) -> tuple[tuple[Path, int, int], ...]:
        """Changes whenever one of the files that are read here does."""
        files = [
            *self._files("configs", "*.toml"),
            *self._files("configs", "step_*/*.toml"),
            *self._files("metrics", "*.jsonl"),
            *self._files("ledger", "*.jsonl"),
            *self._files("spans", "trainer.jsonl"),
        ]
        found = []
        for file in files:
            with suppress(OSError):  # a link that leads nowhere, or in a circle
                found.append((file, (stat := file.stat()).st_mtime_ns, stat.st_size))
        return tuple(found)

    def model_folder(self) -> str | None:
        """`model.name` of the run's configs, where that is a folder on this machine.

        A run that was moved or started elsewhere keeps its own copy of the model beside the configs.
        """
        names = [_section(config, "model").get("name") for config in self._configs()]
        candidates = [name for name in names if isinstance(name, str)]
        if self.folder is not None:
            candidates.append(str(self.folder / "model"))
        return next((name for name in candidates if Path(name).is_dir()), None)

    def losses(self) -> list[tuple[int, dict[str, Any]]]:
        """Every `[trainer.loss]` of the run with the first step that it trained, ascending."""
        if self.folder is None:
            return []
        recorded: dict[int, Mapping[str, Any]] = {}
        for part in ("sft", "trainer"):
            for step, path in settings_files(self.folder, part).items():
                if (config := self._read(path)) is not None:
                    recorded[step] = config
        if not recorded:
            recorded = dict(enumerate(config for config in self._configs() if "trainer" in config))
        losses: list[tuple[int, dict[str, Any]]] = []
        for step, settings in sorted(recorded.items()):
            loss = _section(settings, "trainer").get("loss")
            if isinstance(loss, dict) and loss not in [last for _, last in losses[-1:]]:
                losses.append((step, loss))
        return losses

    def metrics(self) -> dict[str, list[list[float]]]:
        """Every metric -> [step, value] pairs; of a step that a resumed run wrote again, the last value.

        Trainer and engine have metrics of the same name: the engine's begin with `inference/`.
        """
        found: dict[str, dict[int, float]] = {}
        for file in self._files("metrics", "*.jsonl"):
            if file.name == alarms_path(Path()).name:
                continue
            try:
                source = "inference/" if file.stem == "inference" else ""
                for _, record in read_json_lines(file, report=lambda _: None):
                    _add_curves(record, found, source)
            except (DataError, OSError) as error:
                self.problems.setdefault(str(error))
        if self.dump is not None:
            found |= self.dump.means()
        return {name: [[step, points[step]] for step in sorted(points)] for name, points in found.items()}

    def timeline(self) -> Timeline | None:
        """Returns who worked and who waited; None where nothing is recorded of it."""
        if self.folder is None:
            return None
        records: dict[str, list[Any]] = {}
        for name in ("trainer", "orchestrator", "eval"):
            for file in self._files("metrics", f"{name}.jsonl"):
                try:
                    lines = read_json_lines(file, report=lambda _: None)
                    records[name] = [record for _, record in lines if isinstance(record, dict)]
                except (DataError, OSError) as error:
                    self.problems.setdefault(str(error))
        return read_timeline(self.folder, self.problems.setdefault, records)

    def lost_sequences(self, metrics: Mapping[str, Any]) -> str:
        """Says how much of the run its export lacks; empty where it lacks nothing."""
        lost = [(step, number) for step, number in metrics.get("export/lost_sequences", ()) if number > 0]
        if not lost:
            return ""
        total, first, last = sum(number for _, number in lost), lost[0][0], lost[-1][0]
        return (
            f"The token export lacks {total:,.0f} sequences of steps {first} to {last}: its files reached "
            "trainer.experimental.token_export.max_bytes, or the disk was full; logs/trainer.log says which."
        )

    def is_skipped(self, step: int) -> bool:
        """Whether the step moved no weights; an export is written before that is decided."""
        return [step, 1] in self.metrics().get("skipped_steps", [])

    def ledger(self) -> dict[str, Any] | None:
        """Returns where the sampled tokens of each run and environment went; None without a ledger."""
        if not self._files("ledger", "*.jsonl"):
            return None
        assert self.folder is not None
        try:
            report = reconcile(self.folder / "ledger")
        except (PellucidError, OSError) as error:
            return {"error": str(error)}
        accounts = [
            {
                "run": run[:MAX_NAME],
                "env": env[:MAX_NAME],
                "sampled": report.sampled[run, env],
                "states": {state.value: states[state.value] for state in State if states[state.value]},
                "beside": dict(report.beside[run, env]),
            }
            for (run, env), states in report.states.items()
        ]
        return {"accounts": accounts, "balanced": report.balanced, "verdict": report.verdict()}

    def alarms(self) -> list[Alarm]:
        """Returns the alarms that rang in the run."""
        return [] if self.folder is None else read_alarms(self.folder, self.problems.setdefault)

    def _configs(self) -> Iterator[Mapping[str, Any]]:
        for file in self._files("configs", "*.toml"):
            if (config := self._read(file)) is not None:
                yield config

    def _read(self, path: Path) -> Mapping[str, Any] | None:
        try:
            return read_settings_file(path)
        except (PellucidError, OSError) as error:
            self.problems.setdefault(str(error))
            return None

    def _files(self, part: str, pattern: str) -> list[Path]:
        return [] if self.folder is None else sorted((self.folder / part).glob(pattern))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _add_curves(record: Any, found: dict[str, dict[int, float]], source: str) -> None:
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int:
        return
    for name, value in record.items():
        number = number_in(value)
        if name not in ("step", "time") and len(name) <= MAX_NAME and number is not None:
            found.setdefault(f"{source}{name}", {})[step] = number
