"""Gathers the columns of samples into rows of a table; inflates nothing, and copies no large values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pellucid.data.packed import BITS, PAIR_BYTES, RUN, SPAN, PackedArray
from pellucid.data.rows import BitRows, CellRows, Integers, PieceRows, Rows, RunRows, SpanRows
from pellucid.data.schema import COLUMNS, Axis, Column, Encoding
from pellucid.errors import ColumnError

_MASKS = [name for name, column in COLUMNS.items() if column.encoding is Encoding.SPANS]


class Sample(Protocol):
    @property
    def length(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def arrays(self) -> Mapping[str, PackedArray]: ...
    @property
    def values(self) -> Mapping[str, Any]: ...


def gather(samples: Sequence[Sample], only: Collection[str] = COLUMNS.keys()) -> dict[str, Rows]:
    """Gathers every column that some sample has; samples without it get its stand-in or its fill."""
    lengths = {
        Axis.TOKENS: np.array([sample.length for sample in samples], np.int64),
        Axis.SAMPLED: np.array([sample.num_sampled for sample in samples], np.int64),
    }
    names = set[str]().union(*(sample.arrays for sample in samples), *(sample.values for sample in samples))
    rows: dict[str, Rows] = {}
    for name, column in COLUMNS.items():
        if name not in only or (name not in names and not column.required):
            continue
        if column.stored is Axis.SEQUENCES:
            rows[name] = CellRows(_cells(name, samples))
        elif column.encoding is Encoding.SPANS:
            rows[name] = _mask_rows(name, samples, lengths[column.stored])
        else:
            rows[name] = _value_rows(name, samples, lengths[column.stored])
    return rows


def filled(column: Column, size: int, dims: tuple[int, ...] = ()) -> NDArray[Any]:
    array: NDArray[Any] = np.empty((size, *dims), column.array_dtype)
    array.fill(column.fill)
    return array


def _cells(name: str, samples: Sequence[Sample]) -> NDArray[Any]:
    column = COLUMNS[name]
    values = [sample.values.get(name, column.fill) for sample in samples]
    return np.fromiter(values, column.array_dtype, count=len(values))


def _mask_rows(name: str, samples: Sequence[Sample], lengths: Integers) -> Rows:
    """Gives both masks of a table the same form: bits if any sample stores a mask as bits, else spans."""
    packed = [sample.arrays[name] for sample in samples]
    if any(mask.dtype == BITS for mask in _masks(samples)):
        bits = [_bits(mask) for mask in packed]
        return BitRows(np.frombuffer(b"".join(bits), np.uint8), lengths)
    num_spans = np.array([len(mask.data) // PAIR_BYTES for mask in packed], np.int64)
    spans = np.frombuffer(b"".join([mask.data for mask in packed]), SPAN).reshape(-1, 2)
    return SpanRows(spans, num_spans, lengths)


def _masks(samples: Sequence[Sample]) -> Iterable[PackedArray]:
    return (sample.arrays[name] for sample in samples for name in _MASKS)


def _bits(mask: PackedArray) -> bytes:
    return mask.data if mask.dtype == BITS else np.packbits(mask.array(), bitorder="little").tobytes()


def _value_rows(name: str, samples: Sequence[Sample], lengths: Integers) -> Rows:
    packed = [sample.arrays.get(name) for sample in samples]
    present = [array for array in packed if array is not None]
    if len(present) == len(samples) and all(array.is_runs for array in present):
        runs = np.frombuffer(b"".join([array.data for array in present]), RUN).reshape(-1, 2)
        num_runs = np.array([len(array.data) // PAIR_BYTES for array in present], np.int64)
        return RunRows(runs, num_runs, lengths, np.dtype(COLUMNS[name].dtype))
    shapes = {array.shape[1:] for array in present}
    if len(shapes) > 1:
        dims = " × ".join(COLUMNS[name].dims)
        raise ColumnError(name, None, f"has entries of {sorted(shapes)} ({dims}); they need one shape")
    entry = shapes.pop() if shapes else ()
    pieces = [
        _absent(name, sample, entry) if array is None else array.array()
        for sample, array in zip(samples, packed, strict=True)
    ]
    dtypes = {piece.dtype for piece in pieces} or {np.dtype(COLUMNS[name].dtype)}
    dtype = np.result_type(*dtypes)
    if len(dtypes) > 1:
        pieces = [piece.astype(dtype, copy=False) for piece in pieces]
    return PieceRows([(piece,) for piece in pieces], lengths, np.empty((0, *entry), dtype))


def _absent(name: str, sample: Sample, dims: tuple[int, ...]) -> NDArray[Any]:
    column = COLUMNS[name]
    array = filled(column, sample.length if column.stored is Axis.TOKENS else sample.num_sampled, dims)
    if column.stand_in is not None and column.stand_in in sample.values:
        array[:] = sample.values[column.stand_in]
    return array
