"""Values that know how they combine, so that a mean over micro batches and ranks is the mean over tokens.

    Mean(total=6.0, weight=4) + Mean(total=1.0, weight=1)  ->  Mean(7.0, 5), reported as 1.4

A name never decides a reduction; the type does. A value without weight is absent, not zero.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    def __add__(self, other: Self) -> Self: ...

    def report(self) -> Mapping[str, float]:
        """Suffix -> number; the suffix "" is the metric's own name."""


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def report(self) -> Mapping[str, float]:
        return {"": self.total}


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.value, other.value))

    def report(self) -> Mapping[str, float]:
        return {"": self.value}


@dataclass(frozen=True, slots=True)
class Mean:
    total: float
    weight: float

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def report(self) -> Mapping[str, float]:
        return {"": self.total / self.weight} if self.weight else {}


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean, standard deviation and maximum of weighted values."""

    weight: float
    mean: float
    squares: float
    """Sum of squared distances from the mean: combining those is stable where raw squares cancel."""
    maximum: float

    @classmethod
    def of(cls, weight: float, total: float, total_squares: float, maximum: float) -> Self:
        mean = total / weight if weight else 0.0
        return cls(weight, mean, max(total_squares - weight * mean * mean, 0.0), maximum)

    @classmethod
    def of_one(cls, value: float) -> Self:
        return cls(1.0, float(value), 0.0, float(value))

    def __add__(self, other: Self) -> Self:
        weight = self.weight + other.weight
        if not weight:
            return self
        gap = other.mean - self.mean
        return type(self)(
            weight,
            self.mean + gap * other.weight / weight,
            self.squares + other.squares + gap * gap * self.weight * other.weight / weight,
            max(self.maximum, other.maximum),
        )

    def report(self) -> Mapping[str, float]:
        if not self.weight:
            return {}
        std = math.sqrt(self.squares / self.weight)
        return {"/mean": self.mean, "/std": std, "/max": self.maximum}


class NamedMoments(Moments):
    """Moments whose mean also goes by the metric's own name: `reward/all` beside `reward/all/mean`."""

    def report(self) -> Mapping[str, float]:
        return {"": self.mean, **super().report()} if self.weight else {}


class MetricSet:
    """Metrics by name, combined as they arrive."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, metric: Metric) -> None:
        known = self._metrics.get(name)
        if known is not None and type(known) is not type(metric):
            raise TypeError(f"metric {name} is a {type(known).__name__}, not a {type(metric).__name__}")
        self._metrics[name] = metric if known is None else known + metric

    @classmethod
    def combined(cls, sets: Iterable["MetricSet"]) -> "MetricSet":
        """Combines several sets, as if all values had been added to one."""
        whole = cls()
        for part in sets:
            for name, metric in part._metrics.items():
                whole.add(name, metric)
        return whole

    def report(self) -> dict[str, float]:
        return {
            name + suffix: value
            for name, metric in self._metrics.items()
            for suffix, value in metric.report().items()
        }


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
