"""Verdicts: each rollout has exactly one outcome, with its reason.

An outcome is a final state of the ledger, or `sent`: then the trainer decides. Where several states fit, the
first in the ledger's order is the outcome: a failed rollout in a stale group has failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pellucid.data import Rollout, TrainingSample
from pellucid.ledger import Flow, State

Outcome = State | Literal[Flow.SENT]

_PRECEDENCE: dict[Outcome, int] = {state: order for order, state in enumerate((*State, Flow.SENT))}


@dataclass(frozen=True, slots=True)
class Verdict:
    rollout: Rollout
    outcome: Outcome
    reason: str = ""
    advantage: float | None = None
    samples: Sequence[TrainingSample] = ()
    """Samples to train on; empty unless sent."""

    @property
    def is_sent(self) -> bool:
        return self.outcome is Flow.SENT

    def overruled(self, state: State, reason: str) -> "Verdict":
        """Returns the verdict when `state` fits the rollout as well."""
        if _PRECEDENCE[self.outcome] <= _PRECEDENCE[state]:
            return self
        return replace(self, outcome=state, reason=reason, samples=())
