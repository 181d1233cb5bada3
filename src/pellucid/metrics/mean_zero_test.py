"""A sequential test that something is 0 on average; alarms are built on it, see docs/alarms.md."""

import math

import numpy as np

from pellucid.data.alarms import CHANCE

_NUM_STAKES = 10
_BOLDEST_STAKE = 0.9


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

    def __init__(self, bound: float, tolerance: float) -> None:
        self._tolerance = tolerance
        self._sums = np.zeros(3)
        """Number of values, their sum, and the sum of their squares."""

        lowest = bound + tolerance
        stakes = _BOLDEST_STAKE / lowest / 2.0 ** np.arange(_NUM_STAKES)
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
