"""The bytes in which pages and server hand numbers to the browser: a JSON header, then columns.

    4 bytes     length of the header, little endian
    header      {"meta": …, "columns": {name: column}}, UTF-8, padded with spaces to a multiple of 8
    payload     the columns' bytes, each padded to a multiple of 8

A column of `length` values is one of

    {"fill": 0.5}                          one value for all; null where none is known
    {"ramp": 0}                            0, 1, 2, … within each record
    {"type": "u1", "at": 64, "length": 9}  uint8, int16, int32, float32, float64 at an offset of the payload

and may say further

    "split": true                          the first byte of every value, then the second, …: deflates better
    "against": "inference_logprobs"        a difference of bit patterns to a column that is nearly equal
    "per": "record"                        one value per record instead of one per token

No number changes on the way: a float is stored as float32 only where that gives the recorded value back.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Column = dict[str, Any]

_INTEGERS = (("u1", np.uint8), ("i2", np.int16), ("i4", np.int32))


class BlobWriter:
    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._payload: list[bytes] = []
        self._num_bytes = 0

    def add(self, name: str, values: NDArray[Any], **more: Any) -> None:
        self._columns[name] = self._column(values) | more

    def add_near(self, name: str, values: NDArray[Any], against: str, reference: NDArray[Any]) -> None:
        """Adds a column whose values are nearly those of `against`, which was added as it is."""
        column = self._columns[against]
        single = _as_single(values)
        if single is None or column.get("type") != "f4" or "against" in column:
            self.add(name, values)
            return
        change = single.view(np.int32).astype(np.int64) - _nearest_single(reference).view(np.int32)
        if len(change) and np.abs(change).max() >= 2**31:
            self.add(name, values)
            return
        folded = ((change << 1) ^ (change >> 63)).astype(np.uint32)
        self._columns[name] = self._store("f4", folded, split=True) | {"against": against}

    def add_ramp(self, name: str) -> None:
        self._columns[name] = {"ramp": 0}

    def finish(self, meta: Mapping[str, Any], *, level: int | None = 6) -> bytes:
        """Deflated, as `DecompressionStream("deflate")` takes it; as it is where `level` is None."""
        header = orjson.dumps({"meta": meta, "columns": self._columns}, option=orjson.OPT_SERIALIZE_NUMPY)
        header += b" " * (-(len(header) + 4) % 8)
        raw = b"".join([len(header).to_bytes(4, "little"), header, *self._payload])
        return raw if level is None else zlib.compress(raw, level)

    def _column(self, values: NDArray[Any]) -> Column:
        known = np.isfinite(values)
        if not known.any():
            return {"fill": None}
        if known.all() and (values == values[0]).all():
            return {"fill": values[0].item()}
        if known.all() and (whole := _as_integers(values)) is not None:
            kind, integers = whole
            return self._store(kind, integers, split=integers.itemsize > 1)
        single = _as_single(values)
        if single is None:
            return self._store("f8", values.astype(np.float64), split=True)
        return self._store("f4", single, split=True)

    def _store(self, kind: str, values: NDArray[Any], *, split: bool) -> Column:
        column: Column = {"type": kind, "at": self._num_bytes, "length": len(values)}
        raw = np.ascontiguousarray(values)
        if split:
            column["split"] = True
            raw = raw.view(np.uint8).reshape(len(values), -1).T
        data = raw.tobytes()
        data += b"\0" * (-len(data) % 8)
        self._payload.append(data)
        self._num_bytes += len(data)
        return column


def _as_single(values: NDArray[Any]) -> NDArray[np.float32] | None:
    """As float32, None where a known value would change; what is not finite is NaN."""
    known = np.isfinite(values)
    single = _nearest_single(values)
    return single if np.array_equal(single[known], values[known]) else None


def _nearest_single(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    single[~np.isfinite(values)] = np.nan
    return single


def _as_integers(values: NDArray[Any]) -> tuple[str, NDArray[Any]] | None:
    if values.dtype.kind == "f" and not (values == np.rint(values)).all():
        return None
    low, high = values.min(), values.max()
    for kind, dtype in _INTEGERS:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return kind, values.astype(dtype)
    return None
