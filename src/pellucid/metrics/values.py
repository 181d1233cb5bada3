"""Values that know how they combine, so that a mean over micro batches and ranks is the mean over tokens.

    Mean(total=6.0, weight=4) + Mean(total=1.0, weight=1)  ->  Mean(7.0, 5), reported as 1.4

A name never decides a reduction; the type does. A value without weight is absent, not zero.
`MeanZeroTest` says whether something is 0 on average; alarms are built on it, see docs/alarms.md.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from pellucid.data.alarms import CHANCE
from pellucid.data.spans import SpanLog


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
    """`with watch("pack", step): …` adds up to `time/pack_s` until the step is reported, and is a span."""

    def __init__(self, spans: SpanLog | None = None) -> None:
        self._spans = spans
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str, step: int) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - started
            if self._spans is not None:
                self._spans.add(phase, started, ended, step)

    def lap(self) -> dict[str, float]:
        """Seconds per phase and of the whole step since the last lap."""
        now = time.perf_counter()
        report = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        report["time/step_s"] = now - self._started
        self._seconds, self._started = {}, now
        return report


class MeanZeroTest:
    """Tests that values between −bound and bound are 0 on average given all before them, ± a tolerance.

    The values need not be independent, nor alike; it is enough that nobody could have bet on the next one.
    The test is such a bet. With y = ±x − tolerance ≥ −b, of a mean not above 0, and any stake λ < 1/b,

        exp(λ·y − ψ(λ)·y²) ≤ 1 + λ·y      ψ(λ) = (−log(1 − bλ) − bλ) / b²

    (Fan, Grama and Liu 2015), so that the product over all values never grows on average, however many there
    are. By Ville's inequality it ever exceeds 1/p with probability p at most, however often one looks. The
    mean of such products over some stakes and both signs has the same property, and finds large and small
    effects alike.

    The variance is that of what was seen, and yet rare events need no special care: a value of −b that is due
    once in 10,000 tokens cannot be taken for absent after 1,000, since no stake is above 1/b.
    """

    _NUM_STAKES = 10
    _BOLDEST_STAKE = 0.9

    def __init__(self, bound: float, tolerance: float) -> None:
        self._tolerance = tolerance
        self._sums = np.zeros(3)
        """Number of values, their sum, and the sum of their squares."""

        lowest = bound + tolerance
        stakes = self._BOLDEST_STAKE / lowest / 2.0 ** np.arange(self._NUM_STAKES)
        prices = (-np.log1p(-lowest * stakes) - lowest * stakes) / lowest**2
        per_value = -stakes * tolerance - prices * tolerance**2
        per_sum = stakes + 2 * prices * tolerance
        self._log_products = np.vstack(
            [np.column_stack([per_value, sign * per_sum, -prices]) for sign in (1, -1)]
        )
        """Row per stake and sign; its product with the sums is Σ λ·y − ψ(λ)·y²."""

        self._largest = 0.0
        """Largest logarithm of the mean product at any look."""

    def add(self, count: float, total: float, squares: float) -> None:
        """Adds `count` values, given their sum and the sum of their squares, and looks at the products."""
        if not math.isfinite(count + total + squares):
            return
        self._sums += (count, total, squares)
        logs = self._log_products @ self._sums
        highest = logs.max()
        if highest > self._largest:  # the mean is not above the highest
            self._largest = max(self._largest, highest + math.log(np.exp(logs - highest).mean()))

    @property
    def count(self) -> int:
        return int(self._sums[0])

    @property
    def mean(self) -> float:
        return float(self._sums[1] / self._sums[0]) if self._sums[0] else 0.0

    @property
    def threshold(self) -> float:
        """Tolerance with the sign of the mean."""
        return math.copysign(self._tolerance, self.mean)

    @property
    def p_value(self) -> float:
        """The p-value, valid at any time and however often it is read."""
        return math.exp(-self._largest)

    @property
    def rings(self) -> bool:
        return self.p_value < CHANCE
