"""`--set trainer.loss.dppo_mask_high=0.1`: the effect of other settings on the same tokens.

Masks and losses, as recorded and under the changes, side by side. Logprobs are what they were: the first step
is exact, and later ones are what the new settings would have done with the tokens of the old run.
"""

import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from pellucid.checks.replay.recompute import MASKS, replay_advantages, replay_losses
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.config import AdvantageConfig, LossConfig, OrchestratorConfig, TrainerConfig
from pellucid.config.base import dotted_keys
from pellucid.config.explain import nearest
from pellucid.data.table import TokenTable, Values
from pellucid.errors import ConfigError

LOSS, ADVANTAGE = "trainer.loss", "orchestrator.advantage"
_KEYS = tuple(
    key
    for key in (*dotted_keys(TrainerConfig, "trainer."), *dotted_keys(OrchestratorConfig, "orchestrator."))
    if key.startswith((f"{LOSS}.", f"{ADVANTAGE}."))
)
"""Keys that `--set` may change."""

Effect = dict[str, Any]
"""Counts of tokens, and for `recorded` and `changed` what is masked and the share of the step's mean loss;
the losses of all environments add up to it."""

_NO_SIDE = {"masked": 0, "masked_high": 0, "masked_low": 0, "loss": 0.0}
_NO_EFFECT: Effect = {
    **{"sequences": 0, "trainable": 0, "newly_masked": 0, "no_longer_masked": 0},
    **{"recorded": _NO_SIDE, "changed": _NO_SIDE},
}


def change(run: RecordedRun, changes: Sequence[str]) -> tuple[LossConfig, AdvantageConfig | None]:
    """The settings of a run with some of them changed; None: advantages stay as they are."""
    given: dict[str, dict[str, Any]] = {LOSS: {}, ADVANTAGE: {}}
    for text in changes:
        key, equals, value = text.partition("=")
        section, _, name = key.strip().replace("-", "_").rpartition(".")
        nested = section.startswith(f"{ADVANTAGE}.")
        if not equals or (section not in given and not nested):
            near = nearest(key.strip(), [known for known in _KEYS if known.endswith(f".{name}")])
            remedy = "other settings change what is sampled, and that cannot be replayed"
            remedy = remedy if near is None else f"did you mean {near}?"
            raise ConfigError(f"--set {text}: expected {LOSS}.KEY=VALUE or {ADVANTAGE}.KEY=VALUE; {remedy}")
        target = given[ADVANTAGE if nested else section]
        if nested:
            target = target.setdefault(section.removeprefix(f"{ADVANTAGE}."), {})
        try:
            target[name] = tomllib.loads(f"value = {value.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            target[name] = value.strip()  # words need no quotes
    orchestrator = run.orchestrator or OrchestratorConfig()
    loss = _merged(LossConfig, run.trainer.loss, given[LOSS], LOSS)
    advantage = None
    if given[ADVANTAGE]:
        advantage = _merged(AdvantageConfig, orchestrator.advantage, given[ADVANTAGE], ADVANTAGE)
    for section, merged in ((LOSS, loss), (ADVANTAGE, advantage)):
        is_named_here = "import_path" in given[section]
        if merged is not None and not is_named_here and (reason := run.untrusted(merged, section)):
            raise ConfigError(f"--set: {reason}")
    return loss, advantage


def _merged(kind: Any, recorded: Any, given: dict[str, Any], section: str) -> Any:
    """Another `type` has its own keys, and starts from its own defaults."""
    kept = recorded.model_dump()
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


class WhatIf:
    """Effects of changed settings, per step and environment."""

    def __init__(self, run: RecordedRun, changes: Sequence[str]) -> None:
        self._run = run
        self._changes = changes
        self.steps: dict[int, dict[str, Effect]] = {}

    def add(self, number: int, step: TokenTable) -> None:
        run = self._run.at(number)
        loss, advantage = change(run, self._changes)
        old = {**replay_losses(step, run.loss), **{name: step[name] for name in step.columns}}
        advantages = self._advantages(number, step, advantage)
        new = replay_losses(TokenTable(step.lengths, {**step.columns, "advantages": advantages}), loss)
        trainable = step["loss_mask"] == 1
        envs = step.get("env_name", np.full(step.num_sequences, "", object))
        denominator = int(step.get("denominator", np.array([trainable.sum()]))[0])
        effects: dict[str, Effect] = {}
        for env in sorted(set(envs.tolist())):
            rows = np.flatnonzero(envs == env)
            tokens = step.tokens_of(rows)
            tokens = tokens[trainable[tokens]]
            was, becomes = (side["is_masked"][tokens] == 1 for side in (old, new))
            effects[env] = {
                "sequences": len(rows),
                "trainable": len(tokens),
                "newly_masked": int((becomes & ~was).sum()),
                "no_longer_masked": int((was & ~becomes).sum()),
                "recorded": _side(old, tokens, denominator),
                "changed": _side(new, tokens, denominator),
            }
        self.steps[number] = effects

    def _advantages(self, number: int, step: TokenTable, config: AdvantageConfig | None) -> Values:
        """Recomputes them where the rollouts were saved."""
        advantages = step["advantages"].copy()
        if config is not None:
            by_rollout = replay_advantages(self._run.rollouts(number), config)
            for row, rollout in enumerate(step["rollout_id"].tolist()):
                if rollout in by_rollout:
                    advantages[step.token_offsets[row] : step.token_offsets[row + 1]] = by_rollout[rollout]
        return advantages

    def totals(self) -> dict[str, Effect]:
        """Over all steps, by environment and for all of them; losses are means over the steps."""
        totals: dict[str, Effect] = {}
        for env in (*sorted({env for effects in self.steps.values() for env in effects}), "all"):
            chosen = [
                effect
                for effects in self.steps.values()
                for name, effect in effects.items()
                if env in (name, "all")
            ]
            totals[env] = _summed([_NO_EFFECT, *chosen], 1 / max(1, len(self.steps)))
        return totals

    def as_dict(self) -> dict[str, Any]:
        steps = [{"step": step, "envs": effects} for step, effects in self.steps.items()]
        return {"totals": self.totals(), "steps": steps}


def _side(columns: dict[str, Values], tokens: Values, denominator: int) -> Effect:
    masked, high, low = (int((columns[name][tokens] == 1).sum()) for name in MASKS)
    loss = float(columns["token_loss"][tokens].sum(dtype=np.float64)) / denominator
    return {"masked": masked, "masked_high": high, "masked_low": low, "loss": loss}


def _summed(effects: Sequence[Effect], share: float) -> Effect:
    """Adds counts up, and a share of each loss."""
    total: Effect = {}
    for name in effects[0]:
        values = [effect[name] for effect in effects]
        if isinstance(values[0], dict):
            total[name] = _summed(values, share)
        else:
            total[name] = sum(share * value for value in values) if name == "loss" else sum(values)
    return total


def what_if_table(totals: dict[str, Effect], num_steps: int) -> Table:
    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 1))
    table.title = f"{num_steps:,} {'step' if num_steps == 1 else 'steps'}, as recorded and under the changes"
    for title in ("environment", "tokens", "", "masked", "high", "low", "loss", "newly masked", "no longer"):
        table.add_column(title, justify="left" if title in ("environment", "") else "right")
    for env, effect in totals.items():
        style, trainable = "bold" if env == "all" else None, effect["trainable"]
        shown = _cells(effect["recorded"], trainable)
        table.add_row(env or "-", f"{trainable:,}", "recorded", *shown, "", "", style=style)
        moved = f"{effect['newly_masked']:,}", f"{effect['no_longer_masked']:,}"
        table.add_row("", "", "changed", *_cells(effect["changed"], trainable), *moved, style=style)
    return table


def _cells(side: Effect, trainable: int) -> Iterator[str]:
    for name in ("masked", "masked_high", "masked_low"):
        yield f"{side[name] / trainable:.2%}" if trainable else "-"
    yield "-" if np.isnan(side["loss"]) else f"{side['loss']:.4g}"
