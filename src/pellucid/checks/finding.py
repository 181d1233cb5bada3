"""A finding of a check: a number, how large it may be, and what it means if it is larger.

`Differences` collects by how much each stage of the real path differs from the oracle.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pellucid.ledger import Flow, State

EPS = float(np.finfo(np.float32).eps)

COUNTS: Mapping[str, tuple[State | Flow, ...]] = {
    "trained_tokens": (State.TRAINED,),
    "padding_tokens": (Flow.PADDING,),
    "computed_tokens": (Flow.COMPUTED,),
    "tokens": (Flow.COMPUTED, Flow.SAVED),
}
"""The entries of the trainer's ledger that a logged count of a step is the sum of."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    what: str
    """Quantity that was measured."""

    value: float
    limit: float
    meaning: str = ""
    """If it fails: what that says, and what to look at."""

    is_held: bool = True
    """Whether anything was measured; if not, `meaning` says why, and the finding decides nothing."""

    @classmethod
    def not_held(cls, check: str, what: str, why: str) -> "Finding":
        """Says that `what` was held to nothing, and what to do so that it is."""
        return cls(check, what, 0.0, 0.0, why, is_held=False)

    @property
    def passed(self) -> bool:
        return not self.is_held or self.value <= self.limit  # a NaN fails

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "what": self.what,
            "value": self.value if self.is_held else None,
            "limit": self.limit if self.is_held else None,
            "passed": self.passed if self.is_held else None,
            "meaning": "" if self.is_held and self.passed else self.meaning,
        }


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    table = Table(box=None, header_style="bold")
    for title in ("check", "measured", "value", "limit", "verdict"):
        table.add_column(title, justify="right" if title in ("value", "limit") else "left")
    for finding in findings:
        verdict = Text("ok", "green") if finding.passed else Text("FAILED", "bold red")
        value, limit = f"{finding.value:.3g}", f"{finding.limit:.3g}"
        table.add_row(finding.check, finding.what, value, limit, verdict)
    failed = [Padding(f"{each.check}: {each.meaning}", (1, 0, 0, 0)) for each in findings if not each.passed]
    return Group(table, *failed)


STAGES: Mapping[str, str] = {
    "prompts": "chat template → token ids of a prompt; temperature, limits and seeds of requests",
    "examples": "stream of examples → groups: each is attempted, also those of a run that was stopped",
    "samples": "turns → token ids, trainable and sampled tokens, logprobs, versions of a sample",
    "rewards": "score → reward of its own sample",
    "advantages": "rewards of a group → advantages",
    "batches": "groups → batches: whole, in order, full, each rollout once, nothing without a signal",
    "batches by tokens": "lengths of rollouts → what starts, and batches that count tokens; retries",
    "staleness": "groups → those with a token that is too old, which are dropped",
    "saved rollouts": "turns, rewards and outcomes → rollouts/step_N",
    "books of batches": "tokens of rollouts → outcomes in the orchestrator's ledger",
    "metrics of batches": "batches → rewards and off-policy levels that are logged",
    "snapshots": "groups and batches → what a resumed orchestrator goes on from",
    "start": "model and seed → the weights that training starts from",
    "truncation": "samples → sequences of at most seq_len tokens",
    "off-policy levels": "versions of sampled tokens → export",
    "exported fields": "samples → the fields of the export that the trainer does not compute",
    "denominator": "trainable tokens of the step",
    "logprobs": "token ids → the trainer's logprobs",
    "entropy": "token ids → entropy",
    "ratios": "logprobs → ratios and mismatch KL",
    "masks": "ratios and advantages → trust region",
    "token losses": "the loss of each token, weighted",
    "loss": "token losses → the loss of the step",
    "metrics of steps": "tokens → loss, entropy and mismatch KL that are logged",
    "books of steps": "tokens → states in the trainer's ledger, and the counts that are logged",
    "gradient": "loss → gradient",
    "norm": "gradient → its norm",
    "learning rate": "step → learning rate",
    "update": "gradient → clipping → AdamW → weights",
    "published": "weights → weights/step_N",
    "checkpoint": "checkpoints: when they are due, how many are kept, their weights and ledger, the trainer "
    "that goes on",
    "model": "weights → model/, the result of a run",
}
"""Stages in the order in which a token meets them."""


@dataclass
class Differences:
    """The largest difference of each stage, in units of what rounding explains."""

    worst: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, excess: float, where: str) -> None:
        if not excess <= self.worst.get(stage, -1.0):
            self.worst[stage], self.where[stage] = excess, where

    def holds(self, stage: str, is_true: bool, where: str) -> None:
        self.add(stage, 0.0 if is_true else math.inf, where)

    def same(self, stage: str, expected: object, found: object, where: str) -> None:
        """Notes whether two values are equal; nothing rounds here."""
        is_equal = bool(expected == found)
        self.holds(stage, is_equal, where if is_equal else f"{where}: {found!r}, not {expected!r}")

    def near(self, stage: str, expected: Any, found: Any, within: Any, where: str) -> None:
        """Notes by how many times the bound `within` the values differ, NaN being equal to NaN."""
        wanted, actual = (np.atleast_1d(np.asarray(values, float)) for values in (expected, found))
        if wanted.shape != actual.shape:
            self.add(stage, math.inf, f"{where}: shape {actual.shape}, not {wanted.shape}")
            return
        gap = np.where(np.isnan(wanted) & np.isnan(actual), 0.0, np.abs(wanted - actual))
        excess = np.nan_to_num(gap / np.broadcast_to(within, wanted.shape), nan=math.inf)
        if excess.size:
            index = np.unravel_index(int(excess.argmax()), excess.shape)
            values = f"{actual[index]:.9g}, not {wanted[index]:.9g}"
            self.add(stage, float(excess[index]), f"{where}{[int(i) for i in index]}: {values}")

    def findings(self) -> Iterator[Finding]:
        failed = [stage for stage in STAGES if not self.worst.get(stage, 0.0) <= 1.0]
        for stage, what in STAGES.items():
            if stage in self.worst:
                order = "the first stage that differs" if failed[:1] == [stage] else "differs, too"
                measured = f"{stage}: {what}: largest difference ÷ what rounding explains"
                meaning = f"{order}: {stage}, {self.where[stage]}"
                yield Finding("oracle", measured, self.worst[stage], 1.0, meaning)
