"""Reads a run folder's other files for the viewer: metrics per step, ledger, alarms, loss, the tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.data.alarms import Alarm, alarms_path, read_alarms
from pellucid.errors import DataError, PellucidError
from pellucid.export.jsonl import read_json_lines
from pellucid.ledger import Report, State, reconcile
from pellucid.ledger.settings import read_settings_file, settings_files

CURVES = (
    "reward/",
    "zero_advantage_groups/",
    "off_policy_level/",
    "loss",
    "grad_norm",
    "skipped_steps",
    "eval/",
)
"""Metrics that the views show, by how their names begin."""


MAX_NAME = 200
"""Characters of a metric's or an environment's name; what is longer is nobody's name."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run folder. Files that cannot be read are left out, and named once in `problems`."""

    folder: Path | None
    """None for exports that lie outside a run folder."""

    problems: dict[str, None] = field(default_factory=dict)

    @classmethod
    def around(cls, path: Path) -> "RunFolder":
        """Returns the run that `path` is, or is part of."""
        if (path / "token_exports").is_dir():
            return cls(path)
        for parent in (path, *path.parents):
            if parent.name == "token_exports":
                return cls(parent.parent)
        return cls(None)

    def state(self) -> tuple[tuple[Path, int, int], ...]:
        """Changes whenever one of the files that are read here does."""
        files = [
            *self._files("configs", "*.toml"),
            *self._files("configs", "step_*/*.toml"),
            *self._files("metrics", "*.jsonl"),
            *self._files("ledger", "*.jsonl"),
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
        """Metric -> [step, value] pairs; the last word on a step counts, as a resumed run writes it again."""
        found: dict[str, dict[int, float]] = {}
        for file in self._files("metrics", "*.jsonl"):
            if file.name == alarms_path(Path()).name:
                continue
            try:
                for _, record in read_json_lines(file, report=lambda _: None):
                    _add_curves(record, found)
            except (DataError, OSError) as error:
                self.problems.setdefault(str(error))
        return {name: [[step, points[step]] for step in sorted(points)] for name, points in found.items()}

    def is_skipped(self, step: int) -> bool:
        """Whether the step moved no weights; an export is written before that is decided."""
        return [step, 1] in self.metrics().get("skipped_steps", [])

    def ledger(self) -> dict[str, Any] | None:
        if not self._files("ledger", "*.jsonl"):
            return None
        assert self.folder is not None
        try:
            return _accounts(reconcile(self.folder / "ledger"))
        except (PellucidError, OSError) as error:
            return {"error": str(error)}

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


def _add_curves(record: Any, found: dict[str, dict[int, float]]) -> None:
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int:
        return
    for name, value in record.items():
        if name.startswith(CURVES) and len(name) <= MAX_NAME and isinstance(value, int | float):
            found.setdefault(name, {})[step] = value


def _accounts(report: Report) -> dict[str, Any]:
    return {
        "accounts": [
            {
                "run": run[:MAX_NAME],
                "env": env[:MAX_NAME],
                "sampled": report.sampled[run, env],
                "states": {state.value: states[state.value] for state in State if states[state.value]},
                "beside": dict(report.beside[run, env]),
            }
            for (run, env), states in report.states.items()
        ],
        "balanced": report.balanced,
        "verdict": report.verdict(),
        "running": [stage.value for stage in report.running],
    }
