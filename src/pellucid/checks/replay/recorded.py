"""The files that a run leaves of its steps: exports, logged losses, rollouts, and its configuration."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

import pellucid.export
from pellucid.checks.finding import COUNTS
from pellucid.config import (
    AdvantageConfig,
    CustomAdvantageConfig,
    CustomLossConfig,
    LossConfig,
    OrchestratorConfig,
    TrainerConfig,
)
from pellucid.config.base import Section
from pellucid.config.shared import ModelConfig
from pellucid.config.tools import RecordedConfig
from pellucid.errors import ConfigError, DataError
from pellucid.export import Export
from pellucid.export.jsonl import read_json_lines
from pellucid.ledger import Stage, read_journal
from pellucid.ledger.journal import journals_of
from pellucid.ledger.settings import Settings, read_settings_file, settings_at, settings_files

S = TypeVar("S", bound=Section)

_CONFIGS = ("rl", "trainer", "sft", "orchestrator")
"""Files of `configs/`, the ones that say most first."""

_PARTS = ("trainer", "sft", "orchestrator")
"""Those that are recorded per step."""

_COUNTS = (*COUNTS, *(f"total/{name}" for name in COUNTS))


class LoggedStep(NamedTuple):
    """One step as the trainer logged it."""

    loss: float
    """NaN if it was not finite."""

    lr: float | None
    counts: Mapping[str, float]
    """Logged counts of `COUNTS`, and their running totals (`total/…`)."""


class LoggedLevels(NamedTuple):
    """Off-policy levels of one batch, as the orchestrator logged them."""

    batch_tokens: int
    mean: float
    highest: float


@dataclass(frozen=True)
class RecordedRun:
    path: Path
    export: Export
    folder: Path | None
    """None for exports that lie outside a run folder."""

    step: int | None = None
    """The step whose settings are asked for; None: those of the last start."""

    trust_code: bool = False
    """Whether code that the run's settings name may be imported: who opens a folder did not write them."""

    @classmethod
    def open(cls, path: Path, *, trust_code: bool = False) -> "RecordedRun":
        export = pellucid.export.open(path)
        around = [path, *path.resolve().parents]
        folder = next((parent for parent in around if (parent / "configs").is_dir()), None)
        return cls(path, export, folder, trust_code=trust_code)

    def steps(self, wanted: int | None) -> list[int]:
        steps = self.export.steps
        if wanted is None:
            return list(steps)
        if wanted not in steps:
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise DataError(f"{self.path} has no finished export of step {wanted}; it has {known}")
        return [wanted]

    def at(self, step: int) -> "RecordedRun":
        """The run with the settings that shaped a step; a resumed run may have changed them since."""
        start = max((first for first in self._starts if first <= step), default=None)
        return self._starts.setdefault(step if start is None else start, replace(self, step=step))

    @cached_property
    def _starts(self) -> dict[int, "RecordedRun"]:
        """The run with the settings of each start that has its own, by the first step that they shaped."""
        steps = {step for part in _PARTS for step in settings_files(self.folder, part)} if self.folder else ()
        return {step: replace(self, step=step) for step in steps}

    @cached_property
    def trainer(self) -> TrainerConfig:
        """As resolved; the defaults where there is no file."""
        return self._section("trainer", TrainerConfig) or TrainerConfig()

    @cached_property
    def loss(self) -> LossConfig | None:
        """Settings of the loss of rl samples; None where it cannot be computed: see `no_loss`."""
        return None if self.no_loss else self.trainer.loss

    @property
    def no_loss(self) -> str | None:
        """Why the loss of rl samples is not computed again, if it is not: another trainer did not say which
        it is, or has one that is none of ours; or it is somebody's code."""
        is_told = any("loss" in (table.get("trainer") or ()) for table in self._tables.values())
        if self.has_config and not is_told:
            return self.recorded.no_loss or "the export does not name the loss that it was trained with"
        return self.untrusted(self.trainer.loss, "trainer.loss")

    def untrusted(self, config: LossConfig | AdvantageConfig, section: str) -> str | None:
        """Why a function of the run's settings is not called, if it is not."""
        if self.trust_code or not isinstance(config, CustomLossConfig | CustomAdvantageConfig):
            return None
        return (
            f"{section}.import_path = {config.import_path!r} is code that the run's settings name; if you "
            "trust it, --trust-code imports and calls it"
        )

    @cached_property
    def recorded(self) -> RecordedConfig:
        """Returns what another trainer recorded of itself; empty for a run of pellucid's."""
        return self._section("recorded", RecordedConfig) or RecordedConfig()

    @property
    def is_foreign(self) -> bool:
        """Whether another trainer trained it."""
        return any("recorded" in table for table in self._tables.values())

    @cached_property
    def orchestrator(self) -> OrchestratorConfig | None:
        return self._section("orchestrator", OrchestratorConfig)

    @cached_property
    def model(self) -> ModelConfig | None:
        return self._section("model", ModelConfig)

    @property
    def has_config(self) -> bool:
        return bool(self._tables)

    def _section(self, name: str, kind: type[S]) -> S | None:
        for path, table in self._tables.items():
            if name in table:
                try:
                    return kind.model_validate(table[name])
                except ValidationError as error:
                    problem = error.errors()[0]
                    key = ".".join([name, *map(str, problem["loc"])])
                    why = f"{problem['msg']}; was it written by another version?"
                    raise ConfigError(f"{path}: {key} is not what this version reads: {why}") from error
        return None

    @cached_property
    def _tables(self) -> Mapping[Path, Settings]:
        if self.folder is None:
            return {}
        named = [self.folder / "configs" / f"{name}.toml" for name in _CONFIGS]
        last = [path for path in named if path.exists()]
        step = sys.maxsize if self.step is None else self.step
        found = [settings_at(settings_files(self.folder, name), step) for name in _PARTS]
        recorded = [path for path in found if path is not None]
        paths = (last or recorded) if self.step is None else (recorded or last)
        return {path: read_settings_file(path) for path in paths}

    @property
    def max_steps(self) -> int | None:
        """The number of steps that the run was to make, which the learning rate depends on."""
        found = [table["max_steps"] for table in self._tables.values() if "max_steps" in table]
        return int(found[0]) if found else None

    def _lines(self, *parts: str) -> Iterator[tuple[str, Any]]:
        """Reads a file of JSON lines: (place, entry) of each line; none where there is no such file."""
        path = None if self.folder is None else self.folder.joinpath(*parts)
        if path is not None and path.exists():
            for number, entry in read_json_lines(path):
                yield f"{path}:{number}", entry

    @cached_property
    def logged_steps(self) -> Mapping[int, LoggedStep]:
        """Reads the trainer's metrics; the last word counts, as a resumed run writes a step again."""
        logged = {}
        for place, entry in self._lines("metrics", "trainer.jsonl"):
            match entry:
                case {"step": int(step), "loss": int() | float() | None as loss}:
                    rate = entry.get("lr")
                    is_number = isinstance(rate, int | float)
                    counts = {
                        name: entry[name] for name in _COUNTS if isinstance(entry.get(name), int | float)
                    }
                    number = math.nan if loss is None else loss
                    logged[step] = LoggedStep(number, rate if is_number else None, counts)
                case {"loss": _} | list() | str() | int() | float() | None:
                    raise DataError(f"{place} has no step and loss that are numbers; delete that line")
        return logged

    @cached_property
    def logged_levels(self) -> Mapping[int, LoggedLevels]:
        """Reads the off-policy levels that the orchestrator logged for each batch."""
        logged = {}
        for _, entry in self._lines("metrics", "orchestrator.jsonl"):
            match entry:
                case {
                    "step": int(step),
                    "batch_tokens": int() | float() as tokens,
                    "off_policy_level/all/mean": int() | float() as mean,
                    "off_policy_level/all/max": int() | float() as highest,
                }:
                    logged[step] = LoggedLevels(int(tokens), mean, highest)
        return logged

    @cached_property
    def booked(self) -> Mapping[int, Mapping[tuple[str, str], Mapping[str, int]]]:
        """Reads the trainer's ledger: tokens by step, run and environment, and state."""
        paths = [] if self.folder is None else journals_of(self.folder / "ledger", Stage.TRAINER)
        found: dict[int, dict[tuple[str, str], Counter[str]]] = {}
        for entry in chain.from_iterable(read_journal(path) for path in paths if path.exists()):
            if entry.counts:
                accounts = found.setdefault(entry.step, {})
                accounts.setdefault((entry.run, entry.env), Counter()).update(entry.counts)
        return found

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Those that were settled with the step's batch; none where they were not saved."""
        rollouts = []
        for place, entry in self._lines("rollouts", f"step_{step}", "train_rollouts.jsonl"):
            match entry:
                case {"rollout_id": str(), "group_id": str(), "advantage": int() | float() | None}:
                    rollouts.append(dict(entry))
                case _:
                    raise DataError(f"{place} is not a saved rollout; copy the file again")
        return rollouts
