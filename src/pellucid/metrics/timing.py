"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("export"): …` adds up to `time/export_s` until the step is reported."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """Seconds per phase and of the whole step since the last lap."""
        now = time.perf_counter()
        report = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        report["time/step_s"] = now - self._started
        self._seconds, self._started = {}, now
        return report
