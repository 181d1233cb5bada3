"""Arrays as bytes: small in process, ready for the wire, readable in length without inflating.

    PackedArray.pack([True, True, False, True])  ->  data=b"\\x0b", shape=(4,), dtype="bool"
    PackedArray.pack([7, 7, 7, 8], Encoding.RUNS) ->  dtype="runs:int64", two runs: 7×3, 8×1

Bytes are little-endian. Booleans are bit-packed, first value in the lowest bit.
"""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.data.columns import Encoding
from pellucid.errors import DataError

_RUNS = "runs:"
_DTYPES = {"uint8", "uint32", "int32", "int64", "float32"}


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    data: bytes | memoryview
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def pack(cls, values: ArrayLike, encoding: Encoding = Encoding.RAW) -> "PackedArray":
        array = np.asarray(values)
        if array.dtype == np.bool_:
            return cls(np.packbits(array, bitorder="little").tobytes(), array.shape, "bool")
        if encoding is Encoding.RUNS:
            starts = np.flatnonzero(np.diff(array, prepend=array[:1] - 1)) if array.size else np.zeros(0, int)
            counts = np.diff(starts, append=array.size).astype(np.uint32)
            return cls(array[starts].tobytes() + counts.tobytes(), array.shape, _RUNS + array.dtype.name)
        return cls(array.tobytes(), array.shape, array.dtype.name)

    def __len__(self) -> int:
        return self.shape[0]

    def array(self) -> NDArray[Any]:
        """The values; a read-only view of the bytes where no decoding is needed."""
        size = math.prod(self.shape)
        if self.dtype == "bool":
            self._expect((size + 7) // 8)
            bits = np.frombuffer(self.data, np.uint8)
            return np.unpackbits(bits, count=size, bitorder="little").view(np.bool_).reshape(self.shape)
        name = self.dtype.removeprefix(_RUNS)
        if name not in _DTYPES:
            raise DataError(
                f"packed array has dtype {self.dtype!r}; known: bool, {', '.join(sorted(_DTYPES))}"
            )
        dtype = np.dtype(name)
        if self.dtype.startswith(_RUNS):
            return self._runs(dtype, size).reshape(self.shape)
        self._expect(size * dtype.itemsize)
        return np.frombuffer(self.data, dtype).reshape(self.shape)

    def _runs(self, dtype: np.dtype[Any], size: int) -> NDArray[Any]:
        num_runs, rest = divmod(len(self.data), dtype.itemsize + 4)
        if rest:
            raise DataError(f"run-length array of {len(self.data)} bytes is not a whole number of runs")
        values = np.frombuffer(self.data, dtype, count=num_runs)
        counts = np.frombuffer(self.data, np.uint32, offset=num_runs * dtype.itemsize)
        if (total := int(counts.sum(dtype=np.uint64))) != size:
            raise DataError(f"run-length array holds {total} values; its shape {self.shape} needs {size}")
        return np.repeat(values, counts)

    def _expect(self, num_bytes: int) -> None:
        if len(self.data) != num_bytes:
            raise DataError(
                f"packed array of {self.dtype} {self.shape} has {len(self.data)} bytes; needs {num_bytes}"
            )
