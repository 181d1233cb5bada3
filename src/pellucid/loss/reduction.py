"""Weights that make the step's loss a mean over tokens, over sequences, or over groups.

The denominator is always the number of trainable tokens of the step. A mean over sequences or groups is a
mean of weighted token losses; the mean weight over the tokens is 1:

    sequences of 1 and 3 trainable tokens     mean over sequences = Σ w·loss / 4
    weights   4/(2·1) = 2    4/(2·3) = 2/3    2·1 + 2/3·3 = 4

The weights come from the whole batch, before it is packed, so that neither packing nor ranks can change them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pellucid.config import Reduction


def sequence_weights(
    reduction: Reduction, num_trainable: NDArray[np.int64], groups: Sequence[str]
) -> NDArray[np.float32]:
    """Weighs the trainable tokens of each sequence. A sequence without a group ("") is a group of its own."""
    if reduction == "token":
        return np.ones(len(num_trainable), np.float32)
    numbers: dict[str | int, int] = {}
    names = [row if reduction == "sequence" else group or row for row, group in enumerate(groups)]
    units = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    per_unit = np.bincount(units, weights=num_trainable)
    shares = num_trainable.sum() / (max(1, np.count_nonzero(per_unit)) * np.maximum(per_unit, 1))
    weights: NDArray[np.float32] = shares[units].astype(np.float32)
    return weights
