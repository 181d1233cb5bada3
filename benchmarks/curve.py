"""The reward of a run over time, when it has learned the task, and what it did for it.

A point is a step: when the rewards of its rollouts were known, and their mean. The task counts as learned at
the first step at which the mean over the last ten steps is the target.
"""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WINDOW = 10


@dataclass
class Work:
    """Tokens that a phase of a run processed, and its seconds."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Curve:
    name: str
    seed: int
    setting: str = ""
    """The settings that were tried for it; "" for those that it has by its file."""

    startup_s: float = 0.0
    """From the start of the command to the first sampling: imports, loading, servers."""

    points: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the first sampling began, mean reward of the step's rollouts)."""

    num_trained: int = 0
    """Optimizer steps."""

    trained_s: float = 0.0
    """Seconds from the first sampling to the end of the last of them."""

    sampling: Work = field(default_factory=Work)
    """Completion tokens; the engine's or `generate`'s own time."""

    training: Work = field(default_factory=Work)
    """Completion tokens; the trainer's time without waiting, or all of a step that is not `generate`."""

    num_prompts: int = 0
    """Prompts that both sides trained on, compared token by token."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of the command and its children, start and end included."""

    other_cpu_s: float = 0.0
    """CPU seconds of everything else on the machine meanwhile."""

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

    @property
    def steps_per_minute(self) -> float:
        return 60 * self.num_trained / self.trained_s

    @property
    def other_load(self) -> float:
        """Cores that something else kept busy, on average."""
        return self.other_cpu_s / self.wall_s

    def as_dict(self) -> dict[str, Any]:
        points = [(round(time_s, 3), round(reward, 5)) for time_s, reward in self.points]
        rounded = {name: round(value, 3) for name, value in asdict(self).items() if type(value) is float}
        return asdict(self) | rounded | {"points": points}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Curve":
        works = {name: Work(**values[name]) for name in ("sampling", "training")}
        points = [(time_s, reward) for time_s, reward in values["points"]]
        return cls(**values | works | {"points": points})

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict()))

    @classmethod
    def load(cls, path: Path) -> "Curve":
        return cls.from_dict(json.loads(path.read_text()))


@dataclass
class Load:
    """CPU seconds of a stretch of time: of the children that ended in it, and of everything else."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    other_cpu_s: float = 0.0


@contextmanager
def watching_load() -> Iterator[Load]:
    """Context manager around a command: fills the load that it gave and met."""
    load, started, busy, own, children = Load(), time.monotonic(), machine_busy_s(), *_own_s()
    yield load
    own_after, children_after = _own_s()
    load.wall_s = time.monotonic() - started
    load.cpu_s = children_after - children
    load.other_cpu_s = max(0.0, machine_busy_s() - busy - load.cpu_s - (own_after - own))


def _own_s() -> tuple[float, float]:
    """CPU seconds of this process, and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (usage.ru_utime + usage.ru_stime for usage in found)
    return own, children


def machine_busy_s(stat: Path = Path("/proc/stat"), ticks_per_s: int = 100) -> float:
    """CPU seconds since the machine started in which a core was not idle, nor waiting for a disk.

    `cpu  user nice system idle iowait irq softirq steal guest guest_nice`; guests are in user and nice, too.
    """
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / ticks_per_s
