"""Cost of training on a sequence: one part grows with its length, another with its square."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Cost:
    """A sequence of L tokens costs L + L² / parity.

    Cost(parity=40_000).of([10_000, 40_000])  ->  [5e8, 3.2e9], in parts of 1/40,000: 12,500 and 80,000

    Costs are integers, so that every rank makes exactly the same plan.
    """

    parity: int = 40_000
    """Tokens at which attention costs as much as everything else; it follows from the shape of the model."""

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * (self.parity + lengths)

    def behind(
        self, prompts: NDArray[np.int64], own: NDArray[np.int64], *, masked: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Computes the cost of a member's own tokens behind a shared prompt, without that of the prompt.

        `masked` is as in `data/shared_prompts.py`. An unmasked member attends causally to prompt and own
        tokens together. That computes half of a square, so pairs under a mask count twice.
        """
        whole = prompts + own
        attended = np.where(masked, 2 * own * whole, whole**2)
        left: NDArray[np.int64] = own * self.parity + attended
        return left
