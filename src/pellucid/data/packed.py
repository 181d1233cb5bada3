"""Arrays as bytes: small in memory, ready for the wire, with lengths that are read without inflating.

    PackedArray.pack([5, 6, 9])                     05 00 00 00 00 …           dtype "int64"
    PackedArray.pack([False] * 600 + [True] * 400)  (600, 400): one span       dtype "spans"
    PackedArray.pack([True, False, True])           0b101: three bits          dtype "bool"
    PackedArray.pack(versions, RUNS)                (7, 90), (8, 1): two runs  dtype "runs:int32"

Bytes are little-endian. Spans are (start, length) pairs of uint32, runs are (value, count) pairs of int32.
Bits start with the lowest of each byte.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.data.schema import Encoding
from pellucid.errors import DataError

SPANS = "spans"
BITS = "bool"
_RUNS = "runs:"
_DTYPES = {name: np.dtype(name) for name in ("uint8", "uint32", "int16", "int32", "int64", "float32")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KNOWN = (BITS, *_DTYPES)
SPAN = np.dtype("<u4")
RUN = np.dtype("<i4")
PAIR_BYTES = 8
"""Bytes of a span, and of a run."""


class PackedArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    data: bytes
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def pack(cls, values: ArrayLike, encoding: Encoding = Encoding.RAW) -> "PackedArray":
        """Packs an array; masks and runs take the smaller of two forms. Raises DataError for other dtypes."""
        array = np.asarray(values)
        _check_packable(array, encoding)
        if array.dtype == np.bool_:
            spans = spans_of(array)
            if spans.nbytes <= (array.size + 7) // 8:
                return cls(spans.tobytes(), array.shape, SPANS)
            return cls(np.packbits(array, bitorder="little").tobytes(), array.shape, BITS)
        if encoding is Encoding.RUNS and np.can_cast(array.dtype, np.int32):
            runs = runs_of(array)
            if runs.nbytes <= array.nbytes:
                return cls(runs.tobytes(), array.shape, _RUNS + _NAMES[array.dtype])
        return cls(array.tobytes(), array.shape, _NAMES[array.dtype])

    @classmethod
    def of_spans(cls, spans: Sequence[tuple[int, int]], size: int) -> "PackedArray":
        """Packs a mask that is True in the (start, length) stretches `spans`, which come in order; as `pack`
        does, but without painting it."""
        joined: list[tuple[int, int]] = []
        for start, length in spans:
            if not length:
                continue
            if joined and sum(joined[-1]) == start:
                start, before = joined.pop()
                length += before
            joined.append((start, length))
        num_bytes = (size + 7) // 8
        if len(joined) * PAIR_BYTES <= num_bytes:
            pairs = struct.pack(f"<{2 * len(joined)}I", *chain.from_iterable(joined))
            return cls(pairs, (size,), SPANS)
        bits = sum(((1 << length) - 1) << start for start, length in joined)
        return cls(bits.to_bytes(num_bytes, "little"), (size,), BITS)

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[int, int]], dtype: type[np.integer[Any]]) -> "PackedArray":
        """Packs values that are given as (value, count)."""
        size = sum(count for _, count in runs)
        is_short = 0 < PAIR_BYTES * len(runs) <= np.dtype(dtype).itemsize * size
        is_joined = all(before[0] != after[0] for before, after in pairwise(runs))
        if is_short and is_joined and all(count > 0 and _is_int32(value) for value, count in runs):
            pairs = struct.pack(f"<{2 * len(runs)}i", *chain.from_iterable(runs))
            return cls(pairs, (size,), _RUNS + _NAMES[np.dtype(dtype)])
        values, counts = np.array(runs, np.int64).reshape(-1, 2).T
        return cls.pack(np.repeat(values.astype(dtype), counts), Encoding.RUNS)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def is_runs(self) -> bool:
        return self.dtype.startswith(_RUNS)

    def num_true(self) -> int:
        """Counts the True values of a mask without inflating it."""
        if self.dtype == SPANS:
            return int(self.spans()[:, 1].sum())
        self._bits()  # as many as there should be
        return int.from_bytes(self.data).bit_count()

    def spans(self) -> NDArray[np.uint32]:
        """Returns (start, length) of every span; raises DataError if they are out of order or outside."""
        self._expect_pairs()
        spans = np.frombuffer(self.data, SPAN).reshape(-1, 2).astype(np.int64)
        stops = spans.sum(axis=1)
        is_bad = (spans[:, 1] < 1) | (stops > self.shape[0])
        is_bad[1:] |= spans[1:, 0] <= stops[:-1]
        if is_bad.any():
            start, length = spans[is_bad][0]
            raise DataError(
                f"packed array of {self.shape[0]} values has a span of {length} at {start}; "
                "spans are in order, apart and inside"
            )
        return np.frombuffer(self.data, SPAN).reshape(-1, 2)

    def array(self) -> NDArray[Any]:
        """Returns the values; a read-only view of the bytes if no decoding is needed."""
        if (dtype := _DTYPES.get(self.dtype)) is not None:
            self._expect(math.prod(self.shape) * dtype.itemsize)
            values = np.frombuffer(self.data, dtype)
            return values if len(self.shape) == 1 else values.reshape(self.shape)
        size = math.prod(self.shape)
        if self.dtype == SPANS:
            return _painted(self.spans().tolist(), size)
        if self.dtype == BITS:
            bits = np.unpackbits(self._bits(), count=size, bitorder="little")
            return bits.view(np.bool_).reshape(self.shape)
        if self.is_runs and (dtype := _DTYPES.get(self.dtype.removeprefix(_RUNS))) is not None:
            return self._inflated_runs(size).astype(dtype)
        raise DataError(f"packed array has dtype {self.dtype!r}; known: {', '.join([SPANS, *_KNOWN])}")

    def _bits(self) -> NDArray[np.uint8]:
        self._expect((math.prod(self.shape) + 7) // 8)
        return np.frombuffer(self.data, np.uint8)

    def _inflated_runs(self, size: int) -> NDArray[np.int32]:
        self._expect_pairs()
        values, counts = np.frombuffer(self.data, RUN).reshape(-1, 2).T
        if (total := int(counts.sum(dtype=np.int64))) != size or (counts < 1).any():
            raise DataError(f"run-length array holds {total} values; its shape {self.shape} needs {size}")
        return np.repeat(values, counts)

    def _expect_pairs(self) -> None:
        if len(self.data) % PAIR_BYTES:
            raise DataError(
                f"packed array of {self.dtype} has {len(self.data)} bytes; needs a multiple of {PAIR_BYTES}"
            )

    def _expect(self, num_bytes: int) -> None:
        if len(self.data) != num_bytes:
            raise DataError(
                f"packed array of {self.dtype} {self.shape} has {len(self.data)} bytes; needs {num_bytes}"
            )


def _check_packable(array: NDArray[Any], encoding: Encoding) -> None:
    """Raises DataError for other dtypes, big-endian ones included, and for shapes that cannot be packed."""
    if array.dtype not in _NAMES and array.dtype != np.bool_:
        raise DataError(
            f"an array of {array.dtype} cannot be packed; convert it to one of {', '.join(_KNOWN)}"
        )
    flat = array.dtype == np.bool_ or encoding is Encoding.RUNS
    if array.ndim == 0 or (flat and array.ndim > 1):
        raise DataError(
            f"an array of shape {array.shape} cannot be packed; {'masks and runs have' if flat else 'give'} "
            f"{'one dimension' if flat else 'at least one dimension'}"
        )


def _is_int32(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31


def spans_of(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """[. x x . x] -> [[1, 2], [4, 1]]"""
    padded = np.zeros(mask.size + 2, np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1]).astype(SPAN).reshape(-1, 2)
    edges[:, 1] -= edges[:, 0]
    return edges


def runs_of(values: NDArray[Any]) -> NDArray[np.int32]:
    """[7 7 7 8] -> [[7, 3], [8, 1]]"""
    is_start = np.ones(values.size, np.bool_)
    is_start[1:] = values[1:] != values[:-1]
    starts = np.flatnonzero(is_start)
    return np.stack([values[starts], np.diff(starts, append=values.size)], axis=1).astype(RUN)


def _painted(spans: Iterable[tuple[int, int]], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    for start, length in spans:
        mask[start : start + length] = True
    return mask
