"""What a benchmark reports, and how it takes time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_TURN_S = 0.25


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    ours: float
    baseline: float
    unit: str
    against: str

    @property
    def ratio(self) -> float:
        return self.ours / self.baseline

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def fastest_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several runs, after one to warm up: noise only ever adds time."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def fastest_each_s(works: Sequence[Callable[[], object]], repeats: int = 5) -> list[float]:
    """The same for several, taking turns: a machine that is busy for a while is busy for all of them.

    Short work is run again while its turn lasts: its first run pays for the caches that another one filled.
    """
    fastest = [float("inf")] * len(works)
    for _ in range(repeats):
        for index, work in enumerate(works):
            turn_ends = time.perf_counter() + _TURN_S
            while (started := time.perf_counter()) < turn_ends:
                work()
                fastest[index] = min(fastest[index], time.perf_counter() - started)
    return fastest
