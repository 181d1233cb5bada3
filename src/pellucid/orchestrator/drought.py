"""Groups in a row that gave nothing to train on, and when they are a reason to stop. Pure.

a group of which ...                              counts against
every rollout failed, was rejected or is stale    max_fruitless_groups, max_signalless_groups
all that is left is filtered, or has advantage 0  max_signalless_groups
something is ready to be sent                     nothing: the drought is over
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.ledger import State
from pellucid.orchestrator.progress import describe_loss
from pellucid.orchestrator.verdict import Outcome, Verdict

_LEFT_OUT: tuple[Outcome, ...] = (State.ZERO_ADVANTAGE, State.FILTERED)
"""Outcomes of rollouts that did work: they were scored, and then not wanted."""


@dataclass(slots=True)
class Drought:
    """The groups in a row, up to the latest, that gave nothing to train on."""

    num_fruitless: int = 0
    """Latest groups in a row of which every rollout was lost."""

    kinds: Counter[Outcome] = field(default_factory=Counter)
    """Number of groups by outcome."""

    total_reward: float = 0.0
    """Sum of the mean rewards of the groups without a signal."""

    num_unrewarded: int = 0
    """Groups without a signal in which no rollout got more than 0."""

    last_loss: str = ""

    @property
    def num_groups(self) -> int:
        return self.kinds.total()

    def add(self, verdicts: Sequence[Verdict]) -> None:
        """Adds a group of which no rollout will be sent."""
        kind = _kind(verdicts)
        typical = [verdict for verdict in verdicts if verdict.outcome is kind]
        self.kinds[kind] += 1
        self.num_fruitless = 0 if kind in _LEFT_OUT else self.num_fruitless + 1
        if kind is State.ZERO_ADVANTAGE:
            rewards = [verdict.rollout.reward or 0.0 for verdict in typical]
            self.total_reward += sum(rewards) / len(rewards)
            self.num_unrewarded += max(rewards) <= 0
        else:
            self.last_loss = describe_loss(typical[-1])

    def reason_to_stop(self, max_fruitless: int, max_signalless: int) -> str | None:
        """Returns why the run should stop; None while neither limit is reached."""
        if self.num_fruitless >= max_fruitless:
            return (
                f"orchestrator.max_fruitless_groups = {max_fruitless}: as many groups in a row were lost "
                f"whole; the last: {self.last_loss}"
            )
        if self.num_groups < max_signalless:
            return None
        [(kind, number)] = self.kinds.most_common(1)
        why = self._explain_zeros() if kind is State.ZERO_ADVANTAGE else f"the last: {self.last_loss}"
        return (
            f"orchestrator.max_signalless_groups = {max_signalless}: as many groups in a row gave nothing "
            f"to train on, {number} of them for {kind.value}; {why}"
        )

    def _explain_zeros(self) -> str:
        """Says whether the task is too hard or solved. Only the user knows the largest possible reward."""
        number = self.kinds[State.ZERO_ADVANTAGE]
        reward = f"their mean reward is {self.total_reward / number:.3f}"
        if self.num_unrewarded == number:
            return (
                f"{reward}, and no rollout got more than 0: the task is too hard for the model, or the "
                "environment never rewards; look at replies in rollouts/step_N/train_rollouts.jsonl, give it "
                "easier examples or a reward for parts of the task, or raise "
                "orchestrator.rollouts_per_example"
            )
        if self.num_unrewarded:
            return (
                f"{reward}: in {self.num_unrewarded} of {number} groups no rollout got more than 0, in the "
                "others all got the same: each example is too hard for the model or solved; give the "
                "environment examples in between, or raise orchestrator.rollouts_per_example or the limit"
            )
        return (
            f"{reward}, the same for every rollout of a group: the task is solved if that is the most it can "
            "give; stop here, give the environment harder examples, or raise "
            "orchestrator.rollouts_per_example or the limit"
        )


def _kind(verdicts: Sequence[Verdict]) -> Outcome:
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    return next((kind for kind in _LEFT_OUT if kind in outcomes), outcomes.most_common(1)[0][0])
