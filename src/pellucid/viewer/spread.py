"""Chooses the records of a page that cannot hold them all: whole steps, evenly from the first to the last.

    300 steps of 128 records, at most 4,000 -> 31 steps: 0, 10, 20, …, 299

Only where the first and the last step alone are too many are they cut short, after as many tokens as fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Size:
    records: int = 0
    tokens: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.records + other.records, self.tokens + other.tokens)

    def over(self, budget: "Size") -> float:
        """How many times too large; at most 1 where it fits."""
        return max(self.records / budget.records, self.tokens / budget.tokens)


PAGE_BUDGET = Size(records=40_000, tokens=1_000_000)


@dataclass(frozen=True, slots=True)
class Spread:
    sizes: Mapping[int, Size]
    """All there is, by step."""

    budget: Size
    steps: frozenset[int]
    tokens_per_step: int | None
    """Where even the fewest steps are too many: of each, the records up to so many tokens."""

    @property
    def total(self) -> Size:
        return sum(self.sizes.values(), Size())

    def note(self, num_kept: int) -> str | None:
        """Says in a sentence what the page leaves out; None if it leaves out nothing."""
        if num_kept == self.total.records:
            return None
        which = "the first, the last and an even spread between"
        if self.tokens_per_step is not None:
            which += f", the first {self.tokens_per_step:,} tokens or so of each"
        return (
            f"This page shows {num_kept:,} of {self.total.records:,} records, "
            f"from {len(self.steps):,} of {len(self.sizes):,} steps: {which}. "
            f"A page is kept to about {self.budget.records:,} records and {self.budget.tokens:,} tokens; "
            "`--all-records` puts all of them into it, `pellucid view` without `-o` serves them."
        )


def choose_spread(sizes: Mapping[int, Size], budget: Size = PAGE_BUDGET) -> Spread:
    steps = sorted(sizes)
    excess = sum(sizes.values(), Size()).over(budget)
    count = len(steps) if excess <= 1 else max(2, ceil(len(steps) / excess))
    while True:
        chosen = evenly(steps, count)
        excess = sum((sizes[step] for step in chosen), Size()).over(budget)
        if excess <= 1 or count <= 2:
            return Spread(
                sizes, budget, frozenset(chosen), None if excess <= 1 else budget.tokens // len(chosen)
            )
        count -= 1


def evenly(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, the first and the last among them."""
    if count >= len(steps):
        return steps
    last = len(steps) - 1
    return [steps[round(index * last / (count - 1))] for index in range(count)]
