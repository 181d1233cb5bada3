"""The survivors of a final group to verdicts: advantages, filters, samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pellucid.data import Rollout
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.advantage import Advantage, are_equal
from pellucid.orchestrator.filters import Filter, FilterInputs
from pellucid.orchestrator.samples import build_group, build_samples
from pellucid.orchestrator.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Judge:
    run_id: str
    advantage: Advantage
    filter_zero_advantages: bool
    filters: Sequence[Filter] = ()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Returns one verdict per rollout; `sent` means that the rollout may be sent."""
        advantages = self.advantage(rollouts)
        removed_by = self._removed_by(FilterInputs(rollouts, advantages))
        why_zero = (
            "the rewards of its group are equal"
            if are_equal([rollout.reward or 0.0 for rollout in rollouts])
            else "advantage is 0"
        )
        verdicts = [
            self._judge(rollout, advantage, removed, why_zero)
            for rollout, advantage, removed in zip(rollouts, advantages, removed_by, strict=True)
        ]
        fit = iter(self._with_samples([verdict for verdict in verdicts if verdict.is_sent]))
        return [next(fit) if verdict.is_sent else verdict for verdict in verdicts]

    def _removed_by(self, inputs: FilterInputs) -> list[str | None]:
        """Returns, for each rollout, the name of the first filter that removes it, or None."""
        removed: list[str | None] = [None] * len(inputs.rollouts)
        for each in self.filters:
            for index, keep in enumerate(each(inputs)):
                if not keep and removed[index] is None:
                    removed[index] = each.name
        return removed

    def _judge(self, rollout: Rollout, advantage: float, removed_by: str | None, why_zero: str) -> Verdict:
        if removed_by is not None:
            return Verdict(rollout, State.FILTERED, f"removed by {removed_by}", advantage)
        if self.filter_zero_advantages and advantage == 0:
            return Verdict(rollout, State.ZERO_ADVANTAGE, why_zero, advantage)
        return Verdict(rollout, Flow.SENT, "", advantage)

    def _with_samples(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Adds samples to the verdicts; rollouts whose samples cannot train become `rejected`."""
        rollouts = [verdict.rollout for verdict in verdicts]
        advantages = [verdict.advantage or 0.0 for verdict in verdicts]
        try:
            built = build_group(rollouts, advantages, run_id=self.run_id)
        except DataError:  # whose, is found one by one
            return [self._with_own_samples(verdict) for verdict in verdicts]
        return [replace(verdict, samples=samples) for verdict, samples in zip(verdicts, built, strict=True)]

    def _with_own_samples(self, verdict: Verdict) -> Verdict:
        try:
            samples = build_samples(verdict.rollout, run_id=self.run_id, advantage=verdict.advantage or 0.0)
        except DataError as error:
            return Verdict(verdict.rollout, State.REJECTED, str(error), verdict.advantage)
        return replace(verdict, samples=samples)
