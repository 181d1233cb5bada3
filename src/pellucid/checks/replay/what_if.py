"""The effect of other settings on the same tokens: masks and losses, old and new side by side.

Logprobs are what they were: the first step is exact, and later ones are what the new settings would have done
with the tokens of the old run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from pellucid.checks.replay.advantages import replay_advantages
from pellucid.checks.replay.changes import Changed
from pellucid.checks.replay.losses import MASKS, replay_losses
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.config import AdvantageConfig
from pellucid.export.batch import ColumnBatch, Values


@dataclass(frozen=True, slots=True)
class Side:
    """Masked tokens and loss, as recorded or under the changes."""

    masked: int = 0
    masked_high: int = 0
    masked_low: int = 0
    loss: float = 0.0
    """A share of the step's mean: those of all environments add up to it."""

    def plus(self, other: "Side", share: float) -> "Side":
        return Side(
            self.masked + other.masked,
            self.masked_high + other.masked_high,
            self.masked_low + other.masked_low,
            self.loss + share * other.loss,
        )


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect on the tokens of one environment, or of all."""

    sequences: int = 0
    trainable: int = 0
    newly_masked: int = 0
    no_longer_masked: int = 0
    recorded: Side = Side()
    changed: Side = Side()

    def plus(self, other: "Effect", share: float) -> "Effect":
        """With the counts of another, and a share of its loss."""
        return Effect(
            self.sequences + other.sequences,
            self.trainable + other.trainable,
            self.newly_masked + other.newly_masked,
            self.no_longer_masked + other.no_longer_masked,
            self.recorded.plus(other.recorded, share),
            self.changed.plus(other.changed, share),
        )


class WhatIf:
    """Effects per step and environment."""

    def __init__(self, run: RecordedRun, change: Callable[[RecordedRun], Changed]) -> None:
        """`change`: the settings of a step, and what is set otherwise in them."""
        self._run = run
        self._change = change
        self.steps: dict[int, dict[str, Effect]] = {}

    def add(self, number: int, step: ColumnBatch) -> None:
        own = self._run.at(number)
        other = self._change(own)
        old = {**replay_losses(step, own.loss), **step.columns}
        advantages = self._advantages(number, step, other.advantage)
        changed = ColumnBatch(step.lengths, {**step.columns, "advantages": advantages})
        new = replay_losses(changed, other.loss)
        trainable = step.columns["loss_mask"] == 1
        envs = step.columns.get("env_name", np.full(step.num_sequences, "", object))
        denominator = int(trainable.sum())
        if "denominator" in step.columns:
            denominator = int(step.columns["denominator"][0])
        effects: dict[str, Effect] = {}
        for env in sorted(set(envs.tolist())):
            rows = np.flatnonzero(envs == env)
            tokens = step.tokens_of(rows)
            tokens = tokens[trainable[tokens]]
            effects[env] = _effect(old, new, tokens, len(rows), denominator)
        self.steps[number] = effects

    def _advantages(self, number: int, step: ColumnBatch, config: AdvantageConfig | None) -> Values:
        """Recomputed ones, where the rollouts were saved."""
        advantages = step.columns["advantages"].copy()
        if config is not None:
            by_rollout = replay_advantages(self._run.rollouts(number), config)
            for row, rollout in enumerate(step.columns["rollout_id"].tolist()):
                if rollout in by_rollout:
                    advantages[step.offsets[row] : step.offsets[row + 1]] = by_rollout[rollout]
        return advantages

    def totals(self) -> dict[str, Effect]:
        """Over all steps, by environment and for all of them; losses are means over the steps."""
        totals: defaultdict[str, Effect] = defaultdict(Effect)
        for effects in self.steps.values():
            for env, effect in effects.items():
                for name in (env, "all"):
                    totals[name] = totals[name].plus(effect, 1 / len(self.steps))
        envs = sorted(env for env in totals if env != "all")
        return {env: totals[env] for env in (*envs, "all")}

    def as_dict(self) -> dict[str, Any]:
        return {
            "totals": {env: asdict(effect) for env, effect in self.totals().items()},
            "steps": [
                {"step": step, "envs": {env: asdict(effect) for env, effect in effects.items()}}
                for step, effects in self.steps.items()
            ],
        }


def _effect(
    old: dict[str, Values], new: dict[str, Values], tokens: Values, sequences: int, denominator: int
) -> Effect:
    was, becomes = (side["is_masked"][tokens] == 1 for side in (old, new))
    return Effect(
        sequences,
        trainable=len(tokens),
        newly_masked=int((becomes & ~was).sum()),
        no_longer_masked=int((was & ~becomes).sum()),
        recorded=_side(old, tokens, denominator),
        changed=_side(new, tokens, denominator),
    )


def _side(columns: dict[str, Values], tokens: Values, denominator: int) -> Side:
    masked, high, low = (int((columns[name][tokens] == 1).sum()) for name in MASKS)
    return Side(masked, high, low, float(columns["token_loss"][tokens].sum(dtype=np.float64)) / denominator)


def what_if_table(totals: dict[str, Effect], num_steps: int) -> Table:
    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 1))
    table.title = f"{num_steps:,} {'step' if num_steps == 1 else 'steps'}, as recorded and under the changes"
    for title in ("environment", "tokens", "", "masked", "high", "low", "loss", "newly masked", "no longer"):
        table.add_column(title, justify="left" if title in ("environment", "") else "right")
    for env, effect in totals.items():
        style = "bold" if env == "all" else None
        shown = _cells(effect.recorded, effect.trainable)
        table.add_row(env or "-", f"{effect.trainable:,}", "recorded", *shown, "", "", style=style)
        moved = f"{effect.newly_masked:,}", f"{effect.no_longer_masked:,}"
        table.add_row("", "", "changed", *_cells(effect.changed, effect.trainable), *moved, style=style)
    return table


def _cells(side: Side, trainable: int) -> Iterator[str]:
    for count in (side.masked, side.masked_high, side.masked_low):
        yield f"{count / trainable:.2%}" if trainable else "-"
    yield "-" if np.isnan(side.loss) else f"{side.loss:.4g}"
