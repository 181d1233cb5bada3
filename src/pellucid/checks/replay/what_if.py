"""What other settings would have done with the same tokens: masks and losses, old and new side by side.

Logprobs are what they were: the first step is exact, and later ones are what the new settings would have done
with the tokens of the old run.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from pellucid.checks.replay.advantages import replay_advantages
from pellucid.checks.replay.changes import Changed
from pellucid.checks.replay.losses import MASKS, replay_losses
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.export.batch import ColumnBatch, Values


@dataclass(slots=True)
class Effect:
    """Of an environment, or of all: recorded, and under the changes. Losses are shares of the step's mean."""

    sequences: int = 0
    trainable: int = 0
    masked: int = 0
    masked_new: int = 0
    masked_high: int = 0
    masked_high_new: int = 0
    masked_low: int = 0
    masked_low_new: int = 0
    newly_masked: int = 0
    no_longer_masked: int = 0
    loss: float = 0.0
    loss_new: float = 0.0

    def __add__(self, other: "Effect") -> "Effect":
        mine, theirs = asdict(self), asdict(other)
        return Effect(**{name: mine[name] + theirs[name] for name in mine})


class WhatIf:
    """Effects per step and environment."""

    def __init__(self, run: RecordedRun, changed: Changed) -> None:
        self._run = run
        self._changed = changed
        self.steps: dict[int, dict[str, Effect]] = {}

    def add(self, number: int, step: ColumnBatch) -> None:
        old = {**replay_losses(step, self._run.trainer.loss), **step.columns}
        changed = ColumnBatch(step.lengths, {**step.columns, "advantages": self._advantages(number, step)})
        new = replay_losses(changed, self._changed.loss)
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

    def _advantages(self, number: int, step: ColumnBatch) -> Values:
        """Recomputed ones, where the rollouts were saved."""
        advantages = step.columns["advantages"].copy()
        if self._changed.advantage is not None:
            by_rollout = replay_advantages(self._run.rollouts(number), self._changed.advantage)
            for row, rollout in enumerate(step.columns["rollout_id"].tolist()):
                if rollout in by_rollout:
                    advantages[step.offsets[row] : step.offsets[row + 1]] = by_rollout[rollout]
        return advantages

    def totals(self) -> dict[str, Effect]:
        """Over all steps, by environment and for all of them; losses are means over the steps."""
        totals: defaultdict[str, Effect] = defaultdict(Effect)
        for effects in self.steps.values():
            for env, effect in effects.items():
                totals[env] += effect
                totals["all"] += effect
        for effect in totals.values():
            effect.loss /= len(self.steps)
            effect.loss_new /= len(self.steps)
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
    was, becomes = ({name: side[name][tokens] == 1 for name in MASKS} for side in (old, new))
    return Effect(
        sequences=sequences,
        trainable=len(tokens),
        masked=int(was["is_masked"].sum()),
        masked_new=int(becomes["is_masked"].sum()),
        masked_high=int(was["is_masked_high"].sum()),
        masked_high_new=int(becomes["is_masked_high"].sum()),
        masked_low=int(was["is_masked_low"].sum()),
        masked_low_new=int(becomes["is_masked_low"].sum()),
        newly_masked=int((becomes["is_masked"] & ~was["is_masked"]).sum()),
        no_longer_masked=int((was["is_masked"] & ~becomes["is_masked"]).sum()),
        loss=float(old["token_loss"][tokens].astype(np.float64).sum()) / denominator,
        loss_new=float(new["token_loss"][tokens].astype(np.float64).sum()) / denominator,
    )


def what_if_table(totals: dict[str, Effect], num_steps: int) -> Table:
    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 1))
    table.title = f"{num_steps:,} {'step' if num_steps == 1 else 'steps'}, as recorded and under the changes"
    for title in ("environment", "tokens", "", "masked", "high", "low", "loss", "newly masked", "no longer"):
        table.add_column(title, justify="left" if title in ("environment", "") else "right")
    for env, effect in totals.items():
        style = "bold" if env == "all" else None
        table.add_row(
            env or "-", f"{effect.trainable:,}", "recorded", *_cells(effect, ""), "", "", style=style
        )
        moved = f"{effect.newly_masked:,}", f"{effect.no_longer_masked:,}"
        table.add_row("", "", "changed", *_cells(effect, "_new"), *moved, style=style)
    return table


def _cells(effect: Effect, side: str) -> Iterator[str]:
    for name in ("masked", "masked_high", "masked_low"):
        count = getattr(effect, f"{name}{side}")
        yield f"{count / effect.trainable:.2%}" if effect.trainable else "-"
    yield f"{getattr(effect, f'loss{side}'):.4g}"
