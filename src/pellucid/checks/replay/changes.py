"""`--set trainer.loss.dppo_mask_high=0.1`: the settings of a run with some of them changed."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pellucid.checks.replay.recorded import RecordedRun
from pellucid.config import AdvantageConfig, LossConfig, OrchestratorConfig
from pellucid.errors import ConfigError

LOSS, ADVANTAGE = "trainer.loss", "orchestrator.advantage"


@dataclass(frozen=True, slots=True)
class Changed:
    loss: LossConfig
    advantage: AdvantageConfig | None
    """None: advantages stay as they are."""


def change(run: RecordedRun, changes: Sequence[str]) -> Changed:
    given: dict[str, dict[str, Any]] = {LOSS: {}, ADVANTAGE: {}}
    for text in changes:
        key, equals, value = text.partition("=")
        section, _, name = key.strip().replace("-", "_").rpartition(".")
        nested = section.startswith(f"{ADVANTAGE}.")
        if not equals or (section not in given and not nested):
            raise ConfigError(
                f"--set {text}: expected {LOSS}.KEY=VALUE or {ADVANTAGE}.KEY=VALUE; other settings "
                "change what is sampled, and that cannot be replayed"
            )
        target = (
            given[ADVANTAGE].setdefault(section.removeprefix(f"{ADVANTAGE}."), {})
            if nested
            else given[section]
        )
        target[name] = _parse(value.strip())
    orchestrator = run.orchestrator or OrchestratorConfig()
    return Changed(
        _merged(LossConfig, run.trainer.loss, given[LOSS], LOSS),
        _merged(AdvantageConfig, orchestrator.advantage, given[ADVANTAGE], ADVANTAGE)
        if given[ADVANTAGE]
        else None,
    )


def _parse(text: str) -> Any:
    """As in a TOML file; words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merged(kind: Any, own: Any, given: dict[str, Any], section: str) -> Any:
    """Another `type` has its own keys, and starts from its own defaults."""
    kept = own.model_dump()
    if given.get("type", kept["type"]) != kept["type"]:
        kept = {}
    for key, value in given.items():
        kept[key] = {**kept.get(key, {}), **value} if isinstance(value, dict) else value
    try:
        return TypeAdapter(kind).validate_python(kept)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([section, *(str(part) for part in problem["loc"][1:])])
        raise ConfigError(f"--set {key}: {problem['msg']}; see docs/configuration.md") from error
