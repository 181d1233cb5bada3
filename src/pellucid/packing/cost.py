"""What it costs to train on a sequence: one part grows with its length, another with its square."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Cost:
    """A sequence of L tokens costs L + L² / parity.

    Cost(parity=40_000).of([10_000, 40_000])  ->  [5e8, 3.2e9], in parts of 1/40,000: 12,500 and 80,000

    In integers, so that every rank comes to the same plan to the last bit.
    """

    parity: int = 40_000
    """Tokens at which attention costs as much as everything else; it follows from the shape of the model."""

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * (self.parity + lengths)

    def behind(
        self, prompts: NDArray[np.int64], own: NDArray[np.int64], *, masked: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """What is left for a member's own tokens behind a prompt that is computed already: see
        `data/shared_prompts.py`. Half of the pairs are those of a causal square."""
        whole = prompts + own
        attended = np.where(masked, 2 * own * whole, whole**2)
        left: NDArray[np.int64] = own * self.parity + attended
        return left
