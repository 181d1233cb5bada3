"""Storage of a table's columns: rows of different lengths, one per sequence.

    ValueRows   [5 6 9 | 5 8]              slices of one buffer or of many, nothing copied
    SpanRows    [. . x | . x]              (2, 1) | (1, 1): start and length of each run of True
    BitRows     [x . x | . x]              0b101 | 0b10, for masks that have too many spans
    RunRows     [3 3 4 | 4]                (3, 2) (4, 1) | (4, 1): value and count of each run
    CellRows    ["a" | "b"]                one value per sequence

Rows are selected and cut without inflating them. `array` inflates once and caches the result.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_MIN_TOKENS_PER_SPAN = 16  # below that, one pass over a mask beats a loop over its spans
_MAX_SLICES = 64


class Rows(ABC):
    lengths: Integers
    """Number of entries of each row."""

    @cached_property
    def array(self) -> NDArray[Any]:
        """All rows, one after the other."""
        return self._inflate()

    @abstractmethod
    def _inflate(self) -> NDArray[Any]: ...

    def all_pieces(self) -> list[NDArray[Any]]:
        """Returns the arrays that `array` is joined from, in order."""
        return [self.array]

    @abstractmethod
    def select(self, rows: Integers, lengths: Integers | None = None) -> "Rows":
        """Selects rows in the given order, whole or each cut to its first `lengths` entries."""


Pieces = tuple[NDArray[Any], ...]
"""Views that make up a row."""


class ValueRows(Rows):
    empty: NDArray[Any]
    """Array without entries, with the dtype and entry shape of the rows."""

    @abstractmethod
    def pieces(self, rows: Integers | None = None) -> Sequence[Pieces]:
        """Returns the views that make up each of `rows`, or each row when it is None."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.empty.dtype

    @property
    def dims(self) -> tuple[int, ...]:
        return self.empty.shape[1:]

    def all_pieces(self) -> list[NDArray[Any]]:
        return [piece for row in self.pieces() for piece in row]

    def _inflate(self) -> NDArray[Any]:
        return np.concatenate([self.empty, *self.all_pieces()])

    def select(self, rows: Integers, lengths: Integers | None = None) -> "ValueRows":
        pieces = self.pieces(rows)
        if lengths is None:
            return PieceRows(pieces, self.lengths[rows], self.empty)
        cut = [_cut(row, length) for row, length in zip(pieces, lengths.tolist(), strict=True)]
        return PieceRows(cut, lengths, self.empty)


class FlatRows(ValueRows):
    """Rows in one buffer; a row with a shared prefix takes its first entries from another row."""

    def __init__(self, values: NDArray[Any], lengths: Integers, prefixes: "Prefixes | None" = None) -> None:
        self.values = values
        self.empty = values[:0]
        self.lengths = lengths
        self._own = lengths if prefixes is None else lengths - prefixes.lengths
        self._prefixes = prefixes

    @cached_property
    def _starts(self) -> Integers:
        return offsets_of(self._own)[:-1]

    def pieces(self, rows: Integers | None = None) -> list[Pieces]:
        chosen = slice(None) if rows is None else rows
        own = _slices(self.values, self._starts[chosen], self._own[chosen])
        if self._prefixes is None:
            return [(piece,) for piece in own]
        owners, shared = self._prefixes.owners[chosen], self._prefixes.lengths[chosen]
        heads = _slices(self.values, self._starts[owners], shared)
        return [
            (head, tail) if length else (tail,)
            for head, tail, length in zip(heads, own, shared.tolist(), strict=True)
        ]

    def all_pieces(self) -> list[NDArray[Any]]:
        return [self.values] if self._prefixes is None else super().all_pieces()

    def _inflate(self) -> NDArray[Any]:
        return self.values if self._prefixes is None else super()._inflate()


class Prefixes(NamedTuple):
    """Shared prefixes: the first `lengths[i]` entries of row i are those of row `owners[i]`."""

    owners: Integers
    lengths: Integers


class PieceRows(ValueRows):
    """Rows as views of other arrays: of samples, or of another table."""

    def __init__(self, rows: Sequence[Pieces], lengths: Integers, empty: NDArray[Any]) -> None:
        self._rows = rows
        self.empty = empty
        self.lengths = lengths

    def pieces(self, rows: Integers | None = None) -> Sequence[Pieces]:
        return self._rows if rows is None else [self._rows[row] for row in rows.tolist()]


class MaskRows(Rows):
    counts: Integers
    """Number of True entries of each row; counted without inflating."""

    @property
    @abstractmethod
    def first_true(self) -> Integers:
        """Index of each row's first True; the row's length if there is none."""

    @property
    def leads(self) -> NDArray[np.bool_]:
        """Whether the first entry of each row is True."""
        return np.equal(self.first_true, 0)

    @abstractmethod
    def select(self, rows: Integers, lengths: Integers | None = None) -> "MaskRows": ...

    def scatter(self, values: Rows, into: NDArray[Any]) -> None:
        """Writes the values, in order, to the places of `into` where the mask is True."""
        into[self.array] = values.array


class SpanRows(MaskRows):
    def __init__(self, spans: NDArray[np.integer[Any]], num_spans: Integers, lengths: Integers) -> None:
        """Takes `spans` as pairs (start in the row, length), in order and not adjacent."""
        self.spans = spans
        self.num_spans = num_spans
        self.lengths = lengths

    @cached_property
    def span_offsets(self) -> Integers:
        return offsets_of(self.num_spans)

    @cached_property
    def counts(self) -> Integers:  # type: ignore[override]
        return sum_rows(self.spans[:, 1], self.span_offsets)

    @property
    def first_true(self) -> Integers:
        first = self.lengths.copy()
        has = self.num_spans > 0
        first[has] = self.spans[self.span_offsets[:-1][has], 0]
        return first

    def bounds(self) -> tuple[Integers, Integers]:
        """Returns start and stop of every span, counted over all rows."""
        row_starts = np.repeat(offsets_of(self.lengths)[:-1], self.num_spans)
        starts = self.spans[:, 0] + row_starts
        return starts, starts + self.spans[:, 1]

    def _inflate(self) -> NDArray[np.bool_]:
        size = int(self.lengths.sum())
        if len(self.lengths) > _MAX_SLICES and len(self.spans) * _MIN_TOKENS_PER_SPAN > size:
            starts, stops = self.bounds()
            edges = np.zeros(size + 1, np.int8)
            edges[starts] += 1
            edges[stops] -= 1
            return edges[:-1].cumsum(dtype=np.int8).view(np.bool_)
        mask = np.zeros(size, np.bool_)
        for start, stop in self._stretches:
            mask[start:stop] = True
        return mask

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        starts, stops = self.bounds()
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    @cached_property
    def bounds_of_row(self) -> list[tuple[int, int]]:
        """(first, stop) indices of each row's spans."""
        return list(pairwise(self.span_offsets.tolist()))

    def scatter(self, values: Rows, into: NDArray[Any]) -> None:
        if len(self._stretches) * _MIN_TOKENS_PER_SPAN > len(into):
            return super().scatter(values, into)
        _pour(values.all_pieces(), self._stretches, into)

    def select(self, rows: Integers, lengths: Integers | None = None) -> "SpanRows":
        if lengths is None:
            return _SelectedSpanRows(self, rows)
        num_spans = self.num_spans[rows]
        spans = _take(self.spans, self.span_offsets, rows)
        limits = np.repeat(lengths, num_spans) - spans[:, 0]
        kept = limits > 0
        owner = np.repeat(np.arange(len(rows)), num_spans)[kept]
        spans = np.stack([spans[kept, 0], np.minimum(spans[kept, 1], limits[kept])], axis=1)
        return SpanRows(spans, np.bincount(owner, minlength=len(rows)), lengths)


class DenseMaskRows(SpanRows):
    """A mask that is given with one value per token; its spans are found when they are asked for."""

    def __init__(self, mask: NDArray[np.bool_], lengths: Integers) -> None:
        self.array = mask
        self.lengths = lengths

    @cached_property
    def counts(self) -> Integers:  # type: ignore[override]
        return sum_rows(self.array, offsets_of(self.lengths))

    def select(self, rows: Integers, lengths: Integers | None = None) -> "DenseMaskRows":
        selected = FlatRows(self.array, self.lengths).select(rows, lengths)
        return DenseMaskRows(selected.array, selected.lengths)

    @cached_property
    def spans(self) -> NDArray[np.integer[Any]]:  # type: ignore[override]
        return np.stack([self._edges[0] - self._row_starts[self._edges[2]], self._edges[1]], axis=1)

    @cached_property
    def num_spans(self) -> Integers:  # type: ignore[override]
        return np.bincount(self._edges[2], minlength=len(self.lengths))

    @cached_property
    def _row_starts(self) -> Integers:
        return offsets_of(self.lengths)[:-1]

    @cached_property
    def _edges(self) -> tuple[Integers, Integers, Integers]:
        """Start and length of every span, counted over all rows, and the row that it is in."""
        before, after = np.zeros_like(self.array), np.zeros_like(self.array)
        before[1:], after[:-1] = self.array[:-1], self.array[1:]
        first = self._row_starts[self.lengths > 0]
        before[first], after[first - 1] = False, False  # a span ends with its row
        starts, last = np.flatnonzero(self.array & ~before), np.flatnonzero(self.array & ~after)
        owners = np.searchsorted(np.cumsum(self.lengths), starts, side="right")
        return starts, last + 1 - starts, owners


class _SelectedSpanRows(SpanRows):
    """Selected rows of another `SpanRows`. A micro batch has few, for which lists beat array arithmetic."""

    def __init__(self, source: SpanRows, rows: Integers) -> None:
        self._source = source
        self._rows = rows
        self.lengths = source.lengths[rows]
        self.counts = source.counts[rows]

    @cached_property
    def spans(self) -> NDArray[np.integer[Any]]:  # type: ignore[override]
        return _take(self._source.spans, self._source.span_offsets, self._rows)

    @cached_property
    def num_spans(self) -> Integers:  # type: ignore[override]
        return self._source.num_spans[self._rows]

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        spans, bounds = self._source.spans, self._source.bounds_of_row
        stretches, base = [], 0
        for row, row_length in zip(self._rows.tolist(), self.lengths.tolist(), strict=True):
            first, last = bounds[row]
            for start, length in spans[first:last].tolist():
                stretches.append((base + start, base + start + length))
            base += row_length
        return stretches


class BitRows(MaskRows):
    def __init__(self, bits: NDArray[np.uint8], lengths: Integers) -> None:
        """Takes `bits` of which every row starts at a new byte, in its lowest bit; unused bits are 0."""
        self.bits = bits
        self.lengths = lengths

    @cached_property
    def byte_offsets(self) -> Integers:
        return offsets_of((self.lengths + 7) // 8)

    @cached_property
    def counts(self) -> Integers:  # type: ignore[override]
        return np.add.reduceat(np.bitwise_count(self.bits), self.byte_offsets[:-1], dtype=np.int64)

    @property
    def leads(self) -> NDArray[np.bool_]:
        return (self.bits[self.byte_offsets[:-1]] & 1).astype(np.bool_)

    @property
    def first_true(self) -> Integers:
        return np.array([row.argmax() if row.any() else len(row) for row in self._unpacked()], np.int64)

    def _unpacked(self) -> list[NDArray[np.bool_]]:
        offsets = self.byte_offsets.tolist()
        return [
            np.unpackbits(self.bits[start:stop], count=length, bitorder="little").view(np.bool_)
            for start, stop, length in zip(offsets[:-1], offsets[1:], self.lengths.tolist(), strict=True)
        ]

    def _inflate(self) -> NDArray[np.bool_]:
        return np.concatenate([np.zeros(0, np.bool_), *self._unpacked()])

    def select(self, rows: Integers, lengths: Integers | None = None) -> "BitRows":
        lengths = self.lengths[rows] if lengths is None else lengths
        num_bytes = (lengths + 7) // 8
        bits = self.bits[ranges(self.byte_offsets[rows], num_bytes)]
        last, kept = np.cumsum(num_bytes) - 1, lengths % 8
        whole = kept == 0
        bits[last] &= np.where(whole, 255, (1 << kept) - 1).astype(np.uint8)
        return BitRows(bits, lengths)


class RunRows(Rows):
    def __init__(
        self, runs: NDArray[np.int32], num_runs: Integers, lengths: Integers, dtype: np.dtype[Any]
    ) -> None:
        """Takes `runs` as pairs (value, count); the counts of a row add up to its length."""
        self.runs = runs
        self.num_runs = num_runs
        self.lengths = lengths
        self.dtype = dtype

    @cached_property
    def run_offsets(self) -> Integers:
        return offsets_of(self.num_runs)

    def _inflate(self) -> NDArray[Any]:
        return spread(self.runs[:, 0].astype(self.dtype), self.runs[:, 1])

    def all_pieces(self) -> list[NDArray[Any]]:
        if len(self.runs) * _MIN_TOKENS_PER_SPAN > self.lengths.sum():
            return [self.array]
        values, size = self.runs[:, 0].astype(self.dtype), self.dtype.itemsize
        # A view of one value with stride 0; `np.broadcast_to` takes ten times as long to make it.
        return [
            np.ndarray((count,), self.dtype, values, index * size, (0,))
            for index, count in enumerate(self.runs[:, 1].tolist())
        ]

    def select(self, rows: Integers, lengths: Integers | None = None) -> "RunRows":
        num_runs = self.num_runs[rows]
        runs = _take(self.runs, self.run_offsets, rows)
        if lengths is None:
            return RunRows(runs, num_runs, self.lengths[rows], self.dtype)
        row_starts = np.repeat(offsets_of(self.lengths[rows])[:-1], num_runs)
        stops = np.cumsum(runs[:, 1], dtype=np.int64) - row_starts
        runs[:, 1] -= np.clip(stops - np.repeat(lengths, num_runs), 0, runs[:, 1]).astype(np.int32)
        kept = runs[:, 1] > 0
        owner = np.repeat(np.arange(len(rows)), num_runs)[kept]
        return RunRows(runs[kept], np.bincount(owner, minlength=len(rows)), lengths, self.dtype)


class CellRows(Rows):
    def __init__(self, cells: NDArray[Any], codes: Integers | None = None) -> None:
        """Takes one cell per row or, with `codes`, the index of each row's cell."""
        self.cells = cells
        self._codes = codes

    @property
    def lengths(self) -> Integers:  # type: ignore[override]
        return np.ones(len(self.cells if self._codes is None else self._codes), np.int64)

    def of_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Expands `values`, one per cell, to one per row."""
        return values if self._codes is None else values[self._codes]

    def _inflate(self) -> NDArray[Any]:
        return self.of_rows(self.cells)

    def select(self, rows: Integers, lengths: Integers | None = None) -> "CellRows":
        return CellRows(self.cells[rows]) if self._codes is None else CellRows(self.cells, self._codes[rows])


def offsets_of(lengths: Integers) -> Integers:
    """[3, 2] -> [0, 3, 5]"""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets


def sum_rows(values: NDArray[Any], offsets: Integers) -> Integers:
    """Sums `values` between consecutive offsets; an empty stretch gives 0."""
    return np.diff(offsets_of(values.astype(np.int64))[offsets])


def spread(values: NDArray[Any], counts: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """Repeats each value `counts` times; for long stretches several times faster than `np.repeat`."""
    sizes = counts.tolist()
    total = sum(sizes)
    if len(sizes) * _MIN_TOKENS_PER_SPAN > total or values.dtype == object:
        return np.repeat(values, counts)
    filled = np.empty(total, values.dtype)
    start = 0
    for value, size in zip(values.tolist(), sizes, strict=True):
        filled[start : start + size] = value
        start += size
    return filled


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """Concatenates ranges: starts [0, 7], lengths [2, 3] -> [0, 1, 7, 8, 9]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shifts: Integers = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total) + shifts


def _pour(pieces: Iterable[NDArray[Any]], stretches: Iterable[tuple[int, int]], into: NDArray[Any]) -> None:
    """Copies the pieces, in order, into the stretches of `into`; both have the same total length."""
    places = iter(stretches)
    start = stop = 0
    for piece in pieces:
        position, size = 0, len(piece)
        while position < size:
            if start == stop:
                start, stop = next(places)
            step = min(stop - start, size - position)
            into[start : start + step] = piece[position : position + step]
            start += step
            position += step


def _take(values: NDArray[Any], offsets: Integers, rows: Integers) -> NDArray[Any]:
    """Joins the entries of `rows`; for few rows, slices are faster than indices."""
    starts, ends = offsets[rows], offsets[rows + 1]
    if len(rows) > _MAX_SLICES:
        return values[ranges(starts, ends - starts)]
    slices = [values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return np.concatenate([values[:0], *slices])


def _slices(values: NDArray[Any], starts: Integers, lengths: Integers) -> list[NDArray[Any]]:
    ends = (starts + lengths).tolist()
    return [values[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]


def _cut(pieces: Pieces, length: int) -> Pieces:
    kept = []
    for piece in pieces:
        kept.append(piece[:length])
        length -= len(kept[-1])
    return tuple(kept)
