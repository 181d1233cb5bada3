"""Columns that follow from two others, and whether a record agrees with their formulas.

ℓ = log π − log μ    r = exp ℓ    mismatch KL = r − ℓ − 1    Δ = π − μ

A page carries such a column only where it says something else than its formula: the browser computes it from
the logprobs, which are carried exactly.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.export.batch import RATIOS

ABSOLUTE, RELATIVE = 1e-6, 1e-5
"""A record in float32 differs from its formula by rounding: a KL near 0 by 1e-7 if taken as r − ℓ − 1."""


def follows(name: str, recorded: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> bool:
    """Whether every value is the formula's, null where the formula is."""
    trainer, inference = columns.get("trainer_logprobs"), columns.get("inference_logprobs")
    if trainer is None or inference is None:
        return False
    with np.errstate(all="ignore"):
        expected = RATIOS[name](trainer.astype(np.float64), inference.astype(np.float64))
    known = np.isfinite(recorded)
    if not np.array_equal(known, np.isfinite(expected)):
        return False
    error = np.abs(recorded[known] - expected[known])
    return bool((error <= ABSOLUTE + RELATIVE * np.abs(expected[known])).all())
