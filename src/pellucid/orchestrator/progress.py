"""`metrics/progress.json`: what the orchestrator does between two batches, and why rollouts do not train.

One small object, replaced every other second, for whoever watches the run; it goes once the last batch is
sent, or the orchestrator ends:

    {"step": 7, "num_ready": 12, "num_running": 64, "waits_for_weights": false,
     "outcomes": {"zero_advantage": 480, "failed_rollout": 32}, "zero_advantage_reward": 0.0,
     "first_failure": "rollout g3-r0 of math, failed_rollout: ValueError: no answer"}
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pellucid.data.files import read_whole, replace_file
from pellucid.errors import DataError
from pellucid.ledger import State
from pellucid.orchestrator.verdict import Verdict

PROGRESS_FILE = "progress.json"
_UNREMARKABLE = (State.ZERO_ADVANTAGE, State.FILTERED, State.CANCELLED)
_WORDS = {
    State.FAILED_ROLLOUT.value: "failed",
    State.DROPPED_GROUP.value: "dropped with their group",
}


@dataclass(slots=True)
class WasteTally:
    """Rollouts that were settled and will not train, by what became of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    zero_reward: float = 0.0
    """Sum of the rewards of those without a signal."""

    first_failure: str = ""

    def add(self, groups: Iterable[Sequence[Verdict]]) -> "WasteTally":
        for verdict in (verdict for verdicts in groups for verdict in verdicts if not verdict.is_sent):
            self.outcomes[verdict.outcome.value] += 1
            if verdict.outcome is State.ZERO_ADVANTAGE:
                self.zero_reward += verdict.rollout.reward or 0.0
            elif not self.first_failure and verdict.outcome not in _UNREMARKABLE:
                self.first_failure = describe_loss(verdict)
        return self

    def copy(self) -> "WasteTally":
        return WasteTally(self.outcomes.copy(), self.zero_reward, self.first_failure)


def describe_loss(verdict: Verdict) -> str:
    """`rollout g3-r0 of math, failed_rollout: ValueError: no answer`, on one line."""
    rollout, reason = verdict.rollout, " ".join(verdict.reason.split())
    return f"rollout {rollout.rollout_id} of {rollout.env_name}, {verdict.outcome.value}: {reason}"


class BatchProgress(msgspec.Struct, frozen=True):
    step: int
    """Step of the batch that is being sampled."""

    num_ready: int
    """Rollouts that wait for the batch to be full."""

    num_running: int
    waits_for_weights: bool = False
    outcomes: dict[str, int] = {}
    """Rollouts settled since the last batch that do not train, by their state in the ledger."""

    zero_advantage_reward: float | None = None
    """Mean reward of those without a signal."""

    first_failure: str = ""

    @classmethod
    def of(
        cls, tally: WasteTally, *, step: int, num_ready: int, num_running: int, waits_for_weights: bool
    ) -> "BatchProgress":
        num_zero = tally.outcomes[State.ZERO_ADVANTAGE.value]
        return cls(
            step,
            num_ready,
            num_running,
            waits_for_weights,
            dict(tally.outcomes.most_common()),
            tally.zero_reward / num_zero if num_zero else None,
            tally.first_failure,
        )

    def lines(self) -> list[str]:
        """For the console: `step 7: 12 rollouts ready, 64 running; do not train: 480 without a signal, …`.

        None before the first rollout starts and after the last is back.
        """
        if not (self.num_ready or self.num_running or self.outcomes or self.waits_for_weights):
            return []
        waits = "; waits for newer weights" if self.waits_for_weights else ""
        line = f"step {self.step}: {self.num_ready:,} rollouts ready, {self.num_running:,} running{waits}"
        if not self.outcomes:
            return [line]
        reasons = ", ".join(f"{number:,} {self._words(state)}" for state, number in self.outcomes.items())
        cause = (
            [f"  the first that failed or was dropped: {self.first_failure}"] if self.first_failure else []
        )
        return [f"{line}; do not train: {reasons}", *cause]

    def _words(self, state: str) -> str:
        if state == State.ZERO_ADVANTAGE.value and self.zero_advantage_reward is not None:
            return f"without a signal (equal rewards in a group, mean {self.zero_advantage_reward:.3f})"
        return _WORDS.get(state, state)


def progress_path(run_dir: Path) -> Path:
    return run_dir / "metrics" / PROGRESS_FILE


def write_progress(run_dir: Path, progress: BatchProgress) -> None:
    """Replaces the file. A full disk is no error here: this file is no record of the run."""
    with suppress(OSError):
        replace_file(progress_path(run_dir), msgspec.json.encode(progress))


def remove_progress(run_dir: Path) -> None:
    with suppress(OSError):
        progress_path(run_dir).unlink(missing_ok=True)


def read_progress(path: Path) -> BatchProgress | None:
    """None if there is nothing that can be read: before the first rollout, once the last batch is sent."""
    try:
        return msgspec.json.decode(read_whole(path), type=BatchProgress)
    except (OSError, DataError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
