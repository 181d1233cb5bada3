"""`--set trainer.loss.dppo_mask_high=0.1`: the settings of a run with some of them changed."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pellucid.checks.replay.recorded import RecordedRun
from pellucid.config import AdvantageConfig, LossConfig, OrchestratorConfig, TrainerConfig
from pellucid.config.base import dotted_keys
from pellucid.config.explain import nearest
from pellucid.errors import ConfigError

LOSS, ADVANTAGE = "trainer.loss", "orchestrator.advantage"
_KEYS = tuple(
    key
    for key in (*dotted_keys(TrainerConfig, "trainer."), *dotted_keys(OrchestratorConfig, "orchestrator."))
    if key.startswith((f"{LOSS}.", f"{ADVANTAGE}."))
)
"""Keys that `--set` may change."""


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
            near = nearest(key.strip(), [known for known in _KEYS if known.endswith(f".{name}")])
            remedy = (
                "other settings change what is sampled, and that cannot be replayed"
                if near is None
                else f"did you mean {near}?"
            )
            raise ConfigError(f"--set {text}: expected {LOSS}.KEY=VALUE or {ADVANTAGE}.KEY=VALUE; {remedy}")
        target = (
            given[ADVANTAGE].setdefault(section.removeprefix(f"{ADVANTAGE}."), {})
            if nested
            else given[section]
        )
        target[name] = _parse(value.strip())
    orchestrator = run.orchestrator or OrchestratorConfig()
    loss = _merged(LossConfig, run.trainer.loss, given[LOSS], LOSS)
    advantage = None
    if given[ADVANTAGE]:
        advantage = _merged(AdvantageConfig, orchestrator.advantage, given[ADVANTAGE], ADVANTAGE)
    for section, merged in ((LOSS, loss), (ADVANTAGE, advantage)):
        is_named_here = "import_path" in given[section]
        if merged is not None and not is_named_here and (reason := run.untrusted(merged, section)):
            raise ConfigError(f"--set: {reason}")
    return Changed(loss, advantage)


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
        if problem["type"] != "extra_forbidden":
            rule = f"{problem['msg']}; see docs/configuration.md"
        elif key in _KEYS:
            rule = f"belongs to another {section}.type than {kept.get('type')!r}; set that, too"
        else:
            near = nearest(key, _KEYS)
            rule = f"unknown key; {f'did you mean {near}?' if near else 'see docs/configuration.md'}"
        raise ConfigError(f"--set {key}={problem['input']}: {rule}") from error
