"""The survivors of a final group to verdicts: advantages, filters, samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.data import Rollout
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.advantage import Advantage
from pellucid.orchestrator.filters import Filter, FilterInputs
from pellucid.orchestrator.samples import build_samples
from pellucid.orchestrator.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Judge:
    run_id: str
    advantage: Advantage
    filter_zero_advantages: bool
    filters: Sequence[Filter] = ()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """One verdict per rollout; `sent` means that it is fit to be."""
        advantages = self.advantage(rollouts)
        removed_by = self._removed_by(FilterInputs(rollouts, advantages))
        return [
            self._judge(rollout, advantage, removed)
            for rollout, advantage, removed in zip(rollouts, advantages, removed_by, strict=True)
        ]

    def _removed_by(self, inputs: FilterInputs) -> list[str | None]:
        """Of each rollout, the first filter that does not let it through."""
        removed: list[str | None] = [None] * len(inputs.rollouts)
        for each in self.filters:
            for index, keep in enumerate(each(inputs)):
                if not keep and removed[index] is None:
                    removed[index] = each.name
        return removed

    def _judge(self, rollout: Rollout, advantage: float, removed_by: str | None) -> Verdict:
        if removed_by is not None:
            return Verdict(rollout, State.FILTERED, f"removed by {removed_by}", advantage)
        if self.filter_zero_advantages and advantage == 0:
            return Verdict(rollout, State.ZERO_ADVANTAGE, "advantage is 0", advantage)
        try:
            samples = build_samples(rollout, run_id=self.run_id, advantage=advantage)
        except DataError as error:
            return Verdict(rollout, State.REJECTED, str(error), advantage)
        return Verdict(rollout, Flow.SENT, "", advantage, samples)
