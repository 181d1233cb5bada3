"""Joins the experts of a sequence from the records of its turns.

    turn 0    a b X Y               prompt a b, completion X Y     recorded: a b X
    turn 1    a b X Y c Z W         prompt a b X Y c               recorded: a b X Y c Z
    sample    a b X Y c Z W
    experts   0 0 0 1 1 1 1         whose record each token's experts are from

A token has the experts of the turn that computed it first: those gave the logprobs of the tokens sampled in
that turn. The last token of a turn was sampled and never computed, so its experts are in the following turn.
The last token of all has none. It repeats those of the token before it, which changes nothing: it predicts no
token, and no other token attends to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.data.packed import PackedArray


class RecordedExperts(NamedTuple):
    """Experts of a turn's tokens from `start` on; those of earlier tokens are in the record `before`."""

    packed: PackedArray
    """[tokens, layers, top_k]."""

    start: int = 0
    before: "RecordedExperts | None" = None

    @classmethod
    def of(
        cls, recorded: PackedArray | None, before: "RecordedExperts | None" = None
    ) -> "RecordedExperts | None":
        """Makes a record from a server's, which covers all tokens; tokens in `before` are not kept twice."""
        if recorded is None or before is None:
            return None if recorded is None else cls(recorded)
        return cls(PackedArray.pack(recorded.array()[before.stop :]), before.stop, before)

    @property
    def stop(self) -> int:
        return self.start + len(self.packed)

    def rows(self, first: int) -> list[NDArray[np.integer[Any]]]:
        """Returns the experts of the tokens from `first` on, in pieces."""
        pieces = [self.packed.array()[max(first - self.start, 0) :]]
        record = self
        while first < record.start and record.before is not None:
            known, record = record.start, record.before
            pieces.append(record.packed.array()[max(first - record.start, 0) : known - record.start])
        return pieces[::-1]


def join_experts(turns: Sequence[RecordedExperts | None]) -> NDArray[np.integer[Any]] | None:
    """Joins the experts of a sequence's turns, [tokens, layers, top_k]; None if a turn has no record."""
    parts: list[NDArray[np.integer[Any]]] = []
    num_known = 0
    for recorded in turns:
        if recorded is None:
            return None
        parts += recorded.rows(num_known)
        num_known = max(num_known, recorded.stop)
    return np.concatenate([*parts, parts[-1][-1:]])
