"""Rules by which a member of a group shares the common prompt of its group.

    alone     computes the prompt for itself: sharing would save little
    whole     takes keys and values of the shared prompt; attention repeats the prompt's queries
    masked    takes keys and values, too; only its own tokens attend, by a mask, to prompt and themselves

`prompt` and `own` are numbers of tokens, in the prompt and behind it, or arrays of them. Packing plans by
these rules, and the model computes by them.
"""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MAX_OWN = 8
"""Own tokens per token of the prompt up to which sharing pays. In a small model, gathering keys, values and
queries costs a token a 20th of its layers; in others less."""

_MASK_PER_TOKEN = 1024
"""Most entries of a mask per token of the prompt: less memory than its layers would keep for backward."""


@overload
def takes_part(prompt: int, own: int) -> bool: ...
@overload
def takes_part(prompt: Ints, own: Ints) -> Bools: ...
def takes_part(prompt: Any, own: Any) -> Any:
    """Returns whether sharing the prompt pays for this member."""
    return own <= _MAX_OWN * prompt


@overload
def is_masked(prompt: int, own: int) -> bool: ...
@overload
def is_masked(prompt: Ints, own: Ints) -> Bools: ...
def is_masked(prompt: Any, own: Any) -> Any:
    """Returns whether a mask is cheaper and small enough.

    It computes own · (prompt + own) pairs; a causal call over prompt and own tokens, half of (prompt + own)².
    """
    return (own <= prompt) & (own * (prompt + own) <= _MASK_PER_TOKEN * prompt)
