"""Which records go into a page that cannot hold them all: whole steps, evenly from the first to the last.

    300 steps of 128 records, at most 4,000 -> 31 steps: 0, 10, 20, …, 299

Only where the first and the last step alone are too many are records within a step left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    records: int = 0
    tokens: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.records + other.records, self.tokens + other.tokens)

    def over(self, budget: "Size") -> float:
        """How many times too large; at most 1 where it fits."""
        return max(self.records / budget.records, self.tokens / budget.tokens)


PAGE_BUDGET = Size(records=4_000, tokens=500_000)


@dataclass(frozen=True, slots=True)
class Spread:
    sizes: Mapping[int, Size]
    """All there is, by step."""

    budget: Size
    steps: frozenset[int]
    stride: int
    """Keep every `stride`-th record of the chosen steps."""

    @property
    def total(self) -> Size:
        return sum(self.sizes.values(), Size())

    def note(self, num_kept: int) -> str | None:
        """What the page leaves out, in one sentence."""
        if num_kept == self.total.records:
            return None
        which = "the first, the last and an even spread between"
        if self.stride > 1:
            which += f", one record in {self.stride:,}"
        return (
            f"This page shows {num_kept:,} of {self.total.records:,} records, "
            f"from {len(self.steps):,} of {len(self.sizes):,} steps: {which}. "
            f"A page is kept to about {self.budget.records:,} records and {self.budget.tokens:,} tokens; "
            "view one step folder to see more of it."
        )


def measure(records: Iterable[Mapping[str, Any]]) -> dict[int, Size]:
    sizes: dict[int, Size] = {}
    for record in records:
        step = record.get("step", 0)
        sizes[step] = sizes.get(step, Size()) + Size(1, len(record["token_ids"]))
    return sizes


def choose_spread(sizes: Mapping[int, Size], budget: Size = PAGE_BUDGET) -> Spread:
    steps = sorted(sizes)
    excess = sum(sizes.values(), Size()).over(budget)
    count = len(steps) if excess <= 1 else max(2, ceil(len(steps) / excess))
    while True:
        chosen = evenly(steps, count)
        excess = sum((sizes[step] for step in chosen), Size()).over(budget)
        if excess <= 1 or count <= 2:
            return Spread(sizes, budget, frozenset(chosen), max(1, ceil(excess)))
        count -= 1


def evenly(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, the first and the last among them."""
    if count >= len(steps):
        return steps
    last = len(steps) - 1
    return [steps[round(index * last / (count - 1))] for index in range(count)]
