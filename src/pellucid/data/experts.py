"""The experts of a sequence, from what was recorded of its turns.

    turn 0    a b X Y               prompt a b, completion X Y     recorded: a b X
    turn 1    a b X Y c Z W         prompt a b X Y c               recorded: a b X Y c Z
    sample    a b X Y c Z W
    experts   0 0 0 1 1 1 1         whose record each token's experts are from

A token has the experts of the turn that computed it first: those gave the logprobs of the tokens sampled in
that turn. The last token of a turn was sampled and never computed, so the following turn has its experts. The
last of all has none: it repeats those of the token before it, which changes nothing, because it predicts no
token and no other token sees it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.packed import PackedArray


def join_experts(turns: Sequence[PackedArray | None]) -> NDArray[np.integer[Any]] | None:
    """[tokens, layers, top_k] of the sequence that these turns make up; None where one has no record."""
    parts: list[NDArray[np.integer[Any]]] = []
    num_known = 0
    for recorded in turns:
        if recorded is None:
            return None
        parts.append(recorded.array()[num_known:])
        num_known = max(num_known, len(recorded))
    return np.concatenate([*parts, parts[-1][-1:]])
