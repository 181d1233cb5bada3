"""Keys and values of the running sequences, on shelves of equally long rows.

    shelf of 64    a a a a a a . .      row 0, sequence a: 6 tokens so far
                   b b b . . . . .
    shelf of 128   c c c c c c c c c c c c . . . .

A step reads every shelf from end to end: skipping the unused ends of longer rows was measured to take three
times as long per byte. Having several shelves, a short sequence does not pay for the longest one. A sequence
that outgrows its shelf moves to the next, twice as long one; the last row of a shelf moves into a gap.

Invariants:
- From `arrange` to the end of the step no shelf has a gap.
- What was never written is zero, so whatever is hidden from a sequence is finite and can weigh nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.model import Policy, key_shape

_FIRST_CAPACITY = 64
_FIRST_ROWS = 8


@dataclass(eq=False, slots=True)
class CacheRow:
    """Where the keys and values of one sequence are; the cache moves it as the sequence grows."""

    length: int
    """Tokens of the sequence, with the one that the next step computes."""

    shelf: "Shelf"
    index: int


class Shelf:
    """Rows of one capacity, side by side in memory."""

    def __init__(self, capacity: int, max_rows: int, empty: Tensor) -> None:
        """`empty` is [keys and values, layers, no rows, heads, no positions, width]."""
        self.capacity = capacity
        self.rows: list[CacheRow | None] = []
        self._max_rows = max_rows
        self._store = empty.new_zeros(*empty.shape[:4], capacity, empty.shape[5])

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [rows × heads, capacity, width]: views of what is stored."""
        keys, values = self._store[:, :, : len(self.rows)].flatten(2, 3)
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def put(self, row: CacheRow) -> None:
        """Gives a sequence a row; what the row held before stays in it."""
        gaps = (index for index, holder in enumerate(self.rows) if holder is None)
        row.shelf, row.index = self, next(gaps, len(self.rows))
        if row.index == len(self.rows):
            self.rows.append(None)
            self._reserve(len(self.rows))
        self.rows[row.index] = row

    def copy(self, index: int, source: "Shelf", source_index: int, length: int) -> None:
        """Copies the first positions of one row into another."""
        self._store[:, :, index, :, :length] = source._store[:, :, source_index, :, :length]

    def close_gaps(self) -> None:
        for index in reversed(range(len(self.rows))):
            if self.rows[index] is None:
                last = self.rows.pop()
                if last is not None:
                    self.copy(index, self, last.index, last.length - 1)
                    self.rows[index], last.index = last, index
        if not self.rows:
            self._resize(0)

    def _reserve(self, num_rows: int) -> None:
        """Doubles the rows when there are too few, so that growing is rare."""
        held = self._store.shape[2]
        if num_rows > held:
            self._resize(min(max(_FIRST_ROWS, 2 * held), self._max_rows))

    def _resize(self, num_rows: int) -> None:
        shape = list(self._store.shape)
        if num_rows != shape[2]:
            kept = self._store[:, :, :num_rows]
            shape[2] = num_rows - kept.shape[2]
            self._store = torch.cat([kept, kept.new_zeros(shape)], dim=2)


class KVCache:
    def __init__(self, policy: Policy, num_slots: int, max_length: int) -> None:
        heads, width = key_shape(policy)
        dtype = next(policy.parameters()).dtype
        empty = torch.zeros(2, len(policy.layers), 0, heads, 0, width, dtype=dtype, device=policy.device)
        self.shelves = [Shelf(capacity, num_slots, empty) for capacity in _capacities(max_length)]
        """Shortest rows first."""

    def add(self, length: int) -> CacheRow:
        """Returns a row for a new sequence; nothing is written yet."""
        row = CacheRow(length, self.shelves[0], 0)
        self._shelf_for(length).put(row)
        return row

    def remove(self, row: CacheRow) -> None:
        row.shelf.rows[row.index] = None

    def copy_prefix(self, source: CacheRow, target: CacheRow, length: int) -> None:
        """Copies the keys and values of a prompt that is already computed."""
        target.shelf.copy(target.index, source.shelf, source.index, length)

    def arrange(self) -> list[CacheRow]:
        """Moves rows that outgrew their shelf and closes gaps; returns the rows in order of the shelves."""
        for row in self._rows():
            if row.length > row.shelf.capacity:
                self._move_up(row)
        for shelf in self.shelves:
            shelf.close_gaps()
        return list(self._rows())

    def _move_up(self, row: CacheRow) -> None:
        source, source_index = row.shelf, row.index
        self._shelf_for(row.length).put(row)
        row.shelf.copy(row.index, source, source_index, row.length - 1)
        source.rows[source_index] = None

    def _shelf_for(self, length: int) -> Shelf:
        return next(shelf for shelf in self.shelves if length <= shelf.capacity)

    def _rows(self) -> Iterator[CacheRow]:
        return (row for shelf in self.shelves for row in shelf.rows if row is not None)


def _capacities(max_length: int) -> list[int]:
    """64, 128, 256, … and the maximum."""
    doubling = [_FIRST_CAPACITY << exponent for exponent in range(max_length.bit_length())]
    return [capacity for capacity in doubling if capacity < max_length] + [max_length]
