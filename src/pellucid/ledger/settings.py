"""`configs/step_N/PART.toml`: the settings that shape a run's steps from step N on.

Each part writes its own when it starts, at the first step that it shapes. A trainer that was resumed at step
40, and its orchestrator, whose first new batch was that of step 43, leave

    configs/trainer.toml                               as of the last start
    configs/step_0/trainer.toml                        trained steps 0 to 39
    configs/step_40/trainer.toml                       trains steps from 40 on
    configs/step_0/orchestrator.toml                   formed the batches of steps 0 to 42
    configs/step_43/orchestrator.toml                  forms those from 43 on

A start at or before step N replaces what was written for N: those steps are trained, or sampled, anew.
"""

import tomllib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pellucid.config import RunConfig
from pellucid.config.base import save, to_toml
from pellucid.data.files import read_whole, step_folders
from pellucid.errors import ConfigError

T = TypeVar("T")

Settings = Mapping[str, Any]
"""A configuration as its TOML file has it."""

UNNOTED = {
    "clean_output_dir",
    "inference.port",
    "inference.threads",
    "orchestrator.teacher.port",
    "output_dir",
    "resume",
    "run_id",
    "trainer.threads",
    "transport.port",
    "weights.port",
}
"""Keys that differ from start to start and shape no step; `run_id` is compared by the name that it gives."""

_FIXED = {"model.name", "model.lora", "model.lora.alpha", "model.lora.rank", "model.lora.targets"}
"""Keys that no resumed run may change."""


class Change(NamedTuple):
    key: str
    before: Any
    after: Any
    """None: the key is not set."""

    def line(self, step: int) -> str:
        """`trainer.loss.kl_tau: 0.001 → 0.01 from step 40`."""
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)} from step {step}"


def record_settings(config: RunConfig, part: str, step: int) -> list[Change]:
    """Writes down that `config` shapes the steps from `step` on; returns what it changes for them.

    Raises ConfigError, having written nothing, for a change that a resumed run must not make.
    """
    changes = changed_settings(config, part)
    for number, folder in step_folders(config.output_dir / "configs").items():
        if number >= step:
            (folder / f"{part}.toml").unlink(missing_ok=True)
    save(config, config.output_dir / "configs" / f"step_{step}" / f"{part}.toml")
    return changes


def changed_settings(config: RunConfig, part: str) -> list[Change]:
    """Returns the settings that a resumed run changes against the last recorded start; none for a new run.

    Raises ConfigError for a change that a resumed run must not make.
    """
    known = list(read_settings(config.output_dir, part).values()) if config.resume else []
    if not known:
        return []
    before, after = known[-1], tomllib.loads(to_toml(config))
    name, output_dir = before.get("run_id"), before.get("output_dir")
    if name is None and isinstance(output_dir, str):
        name = Path(output_dir).resolve().name
    if name not in (None, config.run_name):
        raise ConfigError(
            f"the run's name in ledger and batches is {name!r} and would become {config.run_name!r}; resume "
            f"with run_id = {name!r}"
        )
    changes = [
        change
        for change in _compare(before, after)
        if change.key not in UNNOTED and not (change.key == "model.name" and _is_same_model(change))
    ]
    for change in changes:
        if change.key in _FIXED:
            raise ConfigError(
                f"{change.key} = {_shown(change.after)}, but the run in output_dir = {config.output_dir} has "
                f"{_shown(change.before)}, which its checkpoints and batches depend on; resume with the "
                "former value, or start another run in a folder of its own"
            )
    return changes


def read_settings(run_dir: Path, part: str) -> dict[int, Settings]:
    """Settings by the first step that they shaped, ascending; see `settings_files`."""
    return {step: read_settings_file(path) for step, path in settings_files(run_dir, part).items()}


def settings_files(run_dir: Path, part: str) -> dict[int, Path]:
    """Files by the first step that they shaped, ascending.

    A folder without such a record, as another trainer's, has one for all steps at most: `configs/PART.toml`.
    """
    name = f"{part}.toml"
    recorded = {
        step: folder / name
        for step, folder in sorted(step_folders(run_dir / "configs").items())
        if (folder / name).exists()
    }
    if not recorded and (run_dir / "configs" / name).exists():
        recorded = {0: run_dir / "configs" / name}
    return recorded


def settings_at(history: Mapping[int, T], step: int) -> T | None:
    """Picks what shaped a step; the first of all for a step before any record."""
    if not history:
        return None
    return history[max((start for start in history if start <= step), default=min(history))]


def read_settings_file(path: Path) -> Settings:
    try:
        return tomllib.loads(read_whole(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; copy it again") from error


def flatten(settings: Settings) -> dict[str, Any]:
    """Returns every value by its whole key: `{"trainer.optim.lr": 0.0003, "orchestrator.env[0].id": …}`."""
    return dict(_leaves(settings, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    match value:
        case Mapping():
            for name, each in value.items():
                yield from _leaves(each, f"{key}.{name}".removeprefix("."))
        case [Mapping(), *_]:
            for index, each in enumerate(value):
                yield from _leaves(each, f"{key}[{index}]")
        case _:
            yield key, value


def _is_same_model(change: Change) -> bool:
    """Whether two names mean one folder, or the former one has been moved: its checkpoints tell what fits."""
    before, after = Path(change.before), Path(change.after)
    if before.is_absolute() and not before.exists():
        return True
    return before.exists() and after.exists() and before.samefile(after)


def _compare(before: Any, after: Any, key: str = "") -> Iterator[Change]:
    match before, after:
        case Mapping(), Mapping():
            for name in sorted({*before, *after}):
                yield from _compare(before.get(name), after.get(name), f"{key}.{name}".removeprefix("."))
        case [Mapping(), *_], [Mapping(), *_]:
            for index, (old, new) in enumerate(zip_longest(before, after)):
                yield from _compare(old, new, f"{key}[{index}]")
        case _ if before != after:
            yield Change(key, before, after)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
