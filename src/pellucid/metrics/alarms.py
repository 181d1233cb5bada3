"""Alarms: what a sound run never shows, watched while it runs; see docs/alarms.md.

An alarm rings once in a process: as a warning in its log, as a line of `metrics/alarms.jsonl`, which the
console and the summary of a run show, and as the metric `alarms/NAME`, 1 from then on. It stops nothing.

Some alarms are exact: one token or weight that breaks a rule is enough. The others test that something is 0
on average, after every step of a run of any length, and ring by chance in one of a million runs:
`MeanZeroTest`.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pellucid.data.alarms import CHANCE, Alarm, alarms_path
from pellucid.data.files import append_whole, require_own
from pellucid.errors import DataError

logger = logging.getLogger(__name__)

_NUM_BETS = 10
_BOLDEST_BET = 0.9


class Bell:
    """The alarms of one process; each rings once."""

    def __init__(self, output_dir: Path, names: Sequence[str]) -> None:
        self._path = alarms_path(output_dir)
        self._has_rung = dict.fromkeys(names, False)

    def ring(self, alarm: Alarm) -> None:
        """Raises nothing: where the file cannot be written, the line is in the log alone."""
        if self._has_rung[alarm.name]:
            return
        self._has_rung[alarm.name] = True
        logger.warning("%s", alarm.line())
        with suppress(OSError, DataError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_own(self._path)
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, msgspec.json.encode(alarm) + b"\n")

    def has_rung(self, name: str) -> bool:
        return self._has_rung[name]

    def metrics(self) -> dict[str, float]:
        return {f"alarms/{name}": int(rung) for name, rung in self._has_rung.items()}


class MeanZeroTest:
    """Tests that values between −bound and bound are 0 on average given all before them, ± a tolerance.

    The values need not be independent, nor alike; it is enough that nobody could have bet on the next one.
    The test is such a bet. With y = ±x − tolerance ≥ −b, of a mean not above 0, and any stake λ < 1/b,

        exp(λ·y − ψ(λ)·y²) ≤ 1 + λ·y      ψ(λ) = (−log(1 − bλ) − bλ) / b²

    (Fan, Grama and Liu 2015), so that the product over all values never grows on average, however many there
    are. By Ville's inequality it ever exceeds 1/p with probability p at most. The mean of such products over
    some stakes and both signs has the same property, and finds large and small effects alike. Two sums are
    all that it has to remember.

    The variance is that of what was seen, and yet rare events need no special care: a value of −b that is due
    once in 10,000 tokens cannot be taken for absent after 1,000, since no stake is above 1/b.
    """

    def __init__(self, bound: float, tolerance: float) -> None:
        self._tolerance = tolerance
        self._lowest = lowest = bound + tolerance
        self._bets = [_BOLDEST_BET / lowest / 2**power for power in range(_NUM_BETS)]
        self._prices = [(-math.log1p(-lowest * bet) - lowest * bet) / lowest**2 for bet in self._bets]
        self.count = 0.0
        self._total = 0.0
        self._squares = 0.0
        self._largest = 0.0
        """Largest logarithm of the mean product so far."""

    def add(self, count: float, total: float, squares: float) -> None:
        """Adds `count` values, given their sum and the sum of their squares."""
        if not all(map(math.isfinite, (count, total, squares))):
            return
        self.count += count
        self._total += total
        self._squares += squares
        self._largest = max(self._largest, self._log_product())

    def _log_product(self) -> float:
        tolerance = self._tolerance
        logs: list[float] = []
        for sign in (1, -1):
            total = sign * self._total - tolerance * self.count
            squares = self._squares - 2 * sign * tolerance * self._total + tolerance**2 * self.count
            pairs = zip(self._bets, self._prices, strict=True)
            logs += [bet * total - price * squares for bet, price in pairs]
        highest = max(logs)
        return highest + math.log(sum(math.exp(each - highest) for each in logs) / len(logs))

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    @property
    def p_value(self) -> float:
        """The p-value, valid at any time and however often it is read."""
        return math.exp(-self._largest)

    @property
    def rings(self) -> bool:
        return self.p_value < CHANCE

    def alarm(self, name: str, step: int, statistic: str, *, example: str, causes: str) -> Alarm:
        """Makes the alarm of a test that rings, with its mean, tolerance and p-value."""
        return Alarm(
            name=name,
            step=step,
            statistic=statistic,
            value=self.mean,
            threshold=math.copysign(self._tolerance, self.mean),
            p_value=self.p_value,
            example=example,
            causes=causes,
        )
