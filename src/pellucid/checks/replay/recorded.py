"""What a run left behind of its steps: exports, logged losses, rollouts, and its configuration."""

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

import pellucid.export
from pellucid.config import LossConfig, OrchestratorConfig, TrainerConfig
from pellucid.config.base import Section
from pellucid.config.model import ModelConfig
from pellucid.config.recorded import RecordedConfig
from pellucid.errors import ConfigError, DataError
from pellucid.export import Export
from pellucid.export.jsonl_source import read_json_lines
from pellucid.ledger.settings import settings_at, settings_files

S = TypeVar("S", bound=Section)

_CONFIGS = ("rl", "trainer", "sft", "orchestrator")
"""Files of `configs/`, the ones that say most first."""

_PARTS = ("trainer", "sft", "orchestrator")
"""Those that are recorded per step."""


@dataclass(frozen=True)
class RecordedRun:
    path: Path
    export: Export
    folder: Path | None
    """None for exports that lie outside a run folder."""

    step: int | None = None
    """The step whose settings are asked for; None: those of the last start."""

    @classmethod
    def open(cls, path: Path) -> "RecordedRun":
        export = pellucid.export.open(path)
        around = [path, *path.resolve().parents]
        folder = next((parent for parent in around if (parent / "configs").is_dir()), None)
        return cls(path, export, folder)

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
        return replace(self, step=step)

    @cached_property
    def trainer(self) -> TrainerConfig:
        """As resolved; the defaults where there is no file."""
        return self._section("trainer", TrainerConfig) or TrainerConfig()

    @cached_property
    def loss(self) -> LossConfig | None:
        """Of rl samples; None where another trainer did not say, or has one that is none of ours."""
        is_told = any("loss" in table.get("trainer", {}) for table in self._tables.values())
        return None if self.has_config and not is_told else self.trainer.loss

    @cached_property
    def recorded(self) -> RecordedConfig:
        """What another trainer says of itself; empty for a run of pellucid's."""
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
                    raise ConfigError(f"{path}: [{name}] is not what this version reads: {error}") from error
        return None

    @cached_property
    def _tables(self) -> Mapping[Path, dict[str, Any]]:
        if self.folder is None:
            return {}
        last = [self.folder / "configs" / f"{name}.toml" for name in _CONFIGS]
        last = [path for path in last if path.exists()]
        step = sys.maxsize if self.step is None else self.step
        found = [settings_at(settings_files(self.folder, name), step) for name in _PARTS]
        recorded = [path for path in found if path is not None]
        paths = (last or recorded) if self.step is None else (recorded or last)
        return {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in paths}

    @cached_property
    def logged_losses(self) -> Mapping[int, float]:
        """By step, NaN if it was not finite; the last word counts, as a resumed run writes a step again."""
        path = None if self.folder is None else self.folder / "metrics" / "trainer.jsonl"
        if path is None or not path.exists():
            return {}
        logged = {entry["step"]: entry["loss"] for _, entry in read_json_lines(path) if "loss" in entry}
        return {step: math.nan if loss is None else loss for step, loss in logged.items()}

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Those that were settled with the step's batch; none where they were not saved."""
        path = (
            None
            if self.folder is None
            else self.folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl"
        )
        return [] if path is None or not path.exists() else [entry for _, entry in read_json_lines(path)]
