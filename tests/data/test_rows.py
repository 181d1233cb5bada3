"""Axis rows against plain lists: selecting and cutting without inflating gives what lists give."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data.packed import runs_of
from pellucid.data.rows import (
    BitRows,
    DenseMaskRows,
    FlatRows,
    PieceRows,
    Prefixes,
    RunRows,
    SpanRows,
    spread,
)

masks = st.lists(st.booleans(), min_size=1, max_size=30)
row_lists = st.lists(masks, min_size=1, max_size=6)


def lengths_of(rows) -> np.ndarray:
    return np.array([len(row) for row in rows], np.int64)


def dense_mask_rows(rows) -> DenseMaskRows:
    return DenseMaskRows(np.concatenate(rows).astype(np.bool_), lengths_of(rows))


def span_rows(rows) -> SpanRows:
    dense = dense_mask_rows(rows)
    return SpanRows(dense.spans, dense.num_spans, dense.lengths)


def bit_rows(rows) -> BitRows:
    packed = [np.packbits(np.array(row, np.bool_), bitorder="little") for row in rows]
    return BitRows(np.concatenate(packed), lengths_of(rows))


def run_rows(rows) -> RunRows:
    runs = [runs_of(np.array(row, np.int32)) for row in rows]
    num_runs = np.array([len(each) for each in runs], np.int64)
    return RunRows(np.concatenate(runs), num_runs, lengths_of(rows), np.dtype(np.int32))


def flat_rows(rows) -> FlatRows:
    return FlatRows(np.concatenate(rows).astype(np.int32), lengths_of(rows))


def piece_rows(rows) -> PieceRows:
    """Every row in two pieces."""
    halves = [
        (np.array(row[: len(row) // 2], np.int32), np.array(row[len(row) // 2 :], np.int32)) for row in rows
    ]
    return PieceRows(halves, lengths_of(rows), np.zeros(0, np.int32))


def flat(rows) -> list:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("make", [dense_mask_rows, span_rows, bit_rows, run_rows, flat_rows, piece_rows])
@given(rows=row_lists, data=st.data())
def test_selecting_and_cutting(make, rows, data) -> None:
    stored = make(rows)
    assert stored.array.tolist() == flat(rows)
    for _ in range(2):  # a selection can be selected from
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
        cuts = [data.draw(st.integers(1, len(rows[index]))) for index in chosen]
        stored = stored.select(np.array(chosen), np.array(cuts))
        rows = [rows[index][:cut] for index, cut in zip(chosen, cuts, strict=True)]
        assert stored.lengths.tolist() == cuts
        assert stored.array.tolist() == flat(rows)


@pytest.mark.parametrize("make", [span_rows, bit_rows])
@given(rows=row_lists)
def test_what_a_mask_tells_without_inflating(make, rows) -> None:
    stored = make(rows)
    assert stored.counts.tolist() == [sum(row) for row in rows]
    assert stored.leads.tolist() == [row[0] for row in rows]
    assert stored.first_true.tolist() == [row.index(True) if any(row) else len(row) for row in rows]
    into = np.full(len(flat(rows)), -1)
    stored.scatter(FlatRows(np.arange(stored.counts.sum()), stored.counts), into)
    numbers = iter(range(len(into)))
    assert into.tolist() == [next(numbers) if value else -1 for value in flat(rows)]


def test_long_spans_are_scattered_span_by_span() -> None:
    """Out of pieces that end elsewhere than the spans, and out of runs."""
    stored = span_rows([[False] * 40 + [True] * 60, [True] * 50])
    numbers = np.arange(1.0, 111.0)
    pieces = PieceRows([(numbers[:55],), (numbers[55:90], numbers[90:])], np.array([55, 55]), numbers[:0])
    into = np.zeros(150)
    stored.scatter(pieces, into)
    assert into.tolist() == [0.0] * 40 + list(range(1, 111))
    stored.scatter(run_rows([[3] * 35 + [4] * 25, [5] * 50]), into)
    assert into.tolist() == [0.0] * 40 + [3] * 35 + [4] * 25 + [5] * 50


def test_rows_with_a_shared_prefix() -> None:
    """Row 1 starts with the first two entries of row 0, row 2 with three."""
    prefixes = Prefixes(np.array([0, 0, 0, 3]), np.array([0, 2, 3, 0]))
    rows = FlatRows(np.array([5, 6, 7, 8, 9, 1]), np.array([3, 4, 3, 1]), prefixes)
    assert rows.array.tolist() == [5, 6, 7, 5, 6, 8, 9, 5, 6, 7, 1]
    assert rows.select(np.array([2, 1]), np.array([2, 3])).array.tolist() == [5, 6, 5, 6, 8]


def test_values_are_views_until_they_are_joined() -> None:
    buffer = np.arange(10)
    rows = FlatRows(buffer, np.array([4, 6]))
    assert rows.array is buffer
    ((piece,),) = rows.select(np.array([1]), np.array([3])).pieces()
    assert np.shares_memory(piece, buffer) and piece.tolist() == [4, 5, 6]


@pytest.mark.parametrize("counts", [[1, 2, 3], [40, 0, 50]])  # few of each, and stretches that are filled
def test_values_are_spread_as_often_as_their_counts_say(counts) -> None:
    values = np.array([0.5, 0.25, -1.0], np.float32)
    expected = [value for value, count in zip(values.tolist(), counts, strict=True) for _ in range(count)]
    assert spread(values, np.array(counts)).tolist() == expected
