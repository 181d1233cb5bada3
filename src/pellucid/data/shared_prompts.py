"""How a member of a group takes part in the prompt that its group has in common.

    alone     computes the prompt for itself: little would be saved
    whole     takes the prompt's keys and values, and attends as it would alone, prompt included
    masked    takes them, too, and its own tokens alone attend: to the prompt and, by a mask, to themselves

`prompt` and `own` (tokens of the prompt, and those behind it) are numbers or arrays of them. Packing plans by
these rules and the model computes by them.
"""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MAX_OWN = 8
"""Gathering keys, values and queries costs a token a 20th of its layers in a small model, less in others."""

_MASK_PER_TOKEN = 1024
"""Numbers of a mask for each token of the prompt: less than its layers would keep for the backward pass."""


@overload
def takes_part(prompt: int, own: int) -> bool: ...
@overload
def takes_part(prompt: Ints, own: Ints) -> Bools: ...
def takes_part(prompt: Any, own: Any) -> Any:
    """Whether the prompt is worth sharing for this member."""
    return own <= _MAX_OWN * prompt


@overload
def is_masked(prompt: int, own: int) -> bool: ...
@overload
def is_masked(prompt: Ints, own: Ints) -> Bools: ...
def is_masked(prompt: Any, own: Any) -> Any:
    """A mask takes own · (prompt + own) pairs, all of it causally half of (prompt + own)²."""
    return (own <= prompt) & (own * (prompt + own) <= _MASK_PER_TOKEN * prompt)
