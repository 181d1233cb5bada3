"""The reward of a run over time, and when it has learned the task.

A point is a step: when the rewards of its rollouts were known, and their mean. The task counts as learned at
the first step at which the mean over the last ten steps is the target.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

WINDOW = 10


@dataclass
class Curve:
    name: str
    seed: int
    startup_s: float = 0.0
    """From the start of the command to the first sampling: imports, loading, servers."""

    points: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the first sampling began, mean reward of the step's rollouts)."""

    def smoothed(self) -> list[tuple[float, float]]:
        """Means over the last ten steps."""
        rewards = [reward for _, reward in self.points]
        return [
            (time_s, sum(rewards[index - WINDOW + 1 : index + 1]) / WINDOW)
            for index, (time_s, _) in enumerate(self.points)
            if index >= WINDOW - 1
        ]

    def reached(self, target: float) -> tuple[float, int] | None:
        """(seconds, steps) until then."""
        for step, (time_s, reward) in enumerate(self.smoothed(), start=WINDOW):
            if reward >= target:
                return time_s, step
        return None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Curve":
        return cls(**json.loads(path.read_text()))
