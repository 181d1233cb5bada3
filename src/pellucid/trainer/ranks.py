"""The processes that train one model together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of them this is, and how each gets to know what all of them counted."""

    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[Any], list[Any]] = _alone
    """From a value of this rank to those of all ranks, in order. Every rank calls it, at the same point."""
