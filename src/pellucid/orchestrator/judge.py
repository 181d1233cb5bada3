"""The survivors of a final group to verdicts: advantages, filters, samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.data import Rollout
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.advantage import Advantage
from pellucid.orchestrator.samples import build_samples
from pellucid.orchestrator.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Judge:
    run_id: str
    advantage: Advantage
    filter_zero_advantages: bool

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """One verdict per rollout; `sent` means that it is fit to be."""
        advantages = self.advantage(rollouts)
        return [
            self._judge(rollout, advantage) for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]

    def _judge(self, rollout: Rollout, advantage: float) -> Verdict:
        if self.filter_zero_advantages and advantage == 0:
            return Verdict(rollout, State.ZERO_ADVANTAGE, "advantage is 0", advantage)
        try:
            samples = build_samples(rollout, run_id=self.run_id, advantage=advantage)
        except DataError as error:
            return Verdict(rollout, State.REJECTED, str(error), advantage)
        return Verdict(rollout, Flow.SENT, "", advantage, samples)
