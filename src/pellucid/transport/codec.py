"""Bytes <-> batch, pure. See docs/wire-format.md.

A payload is a header and a msgpack body of packed columns:

    4 bytes  b"PLCD"        8 bytes  body length, little-endian
    2 bytes  version        4 bytes  CRC-32 of the body
    body     msgpack: run id, step, lengths, arrays by column, objects by column

Decoding gives views of the payload wherever a column is stored raw.
"""

import struct
import zlib
from typing import Any

import msgspec
import numpy as np

from pellucid.data import COLUMNS, PackedArray, Stored, TokenTable
from pellucid.errors import DataError, PayloadError
from pellucid.transport.channel import Batch

MAGIC = b"PLCD"
VERSION = 1
_HEADER = struct.Struct("<4sHQI")


class _Column(msgspec.Struct, frozen=True, array_like=True):
    data: memoryview
    shape: tuple[int, ...]
    dtype: str


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_id: str
    step: int
    lengths: _Column
    arrays: dict[str, _Column]
    objects: dict[str, list[Any]]


def encode_batch(batch: Batch) -> bytes:
    arrays: dict[str, PackedArray] = {}
    objects: dict[str, list[Any]] = {}
    for name, array in batch.table.columns.items():
        if COLUMNS[name].dtype is object:
            objects[name] = array.tolist()
        else:
            arrays[name] = PackedArray.pack(array, COLUMNS[name].encoding)
    body = msgspec.msgpack.encode(
        {
            "run_id": batch.run_id,
            "step": batch.step,
            "lengths": PackedArray.pack(batch.table.lengths),
            "arrays": arrays,
            "objects": objects,
        }
    )
    return _HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body


def decode_batch(payload: bytes | memoryview, *, sender: str) -> Batch:
    """The batch in a payload; `sender` is named in the refusal of a bad one."""
    body = _checked_body(memoryview(payload), sender)
    try:
        decoded = msgspec.msgpack.decode(body, type=_Body)
        table = TokenTable(_inflate(decoded.lengths), _columns(decoded))
    except (msgspec.DecodeError, DataError) as error:
        raise PayloadError(f"payload from {sender}: {error}") from error
    return Batch(decoded.run_id, decoded.step, table)


def _checked_body(payload: memoryview, sender: str) -> memoryview:
    if len(payload) < _HEADER.size:
        raise PayloadError(
            f"payload from {sender}: {len(payload)} bytes; the header alone has {_HEADER.size}"
        )
    magic, version, num_bytes, checksum = _HEADER.unpack_from(payload)
    body = payload[_HEADER.size :]
    if magic != MAGIC:
        raise PayloadError(f"payload from {sender}: starts with {magic!r}; expected {MAGIC!r}")
    if version != VERSION:
        raise PayloadError(f"payload from {sender}: format version {version}; this pellucid reads {VERSION}")
    if len(body) != num_bytes:
        raise PayloadError(f"payload from {sender}: body of {len(body)} bytes; the header says {num_bytes}")
    if (found := zlib.crc32(body)) != checksum:
        raise PayloadError(f"payload from {sender}: checksum {found:08x}; the header says {checksum:08x}")
    return body


def _inflate(column: _Column) -> Any:
    return PackedArray(column.data, column.shape, column.dtype).array()


def _columns(body: _Body) -> dict[str, Any]:
    columns = {}
    for name, column in body.arrays.items():
        array = _inflate(column)
        if name not in COLUMNS or COLUMNS[name].dtype is object:
            raise DataError(f"array column {name!r} is not known")
        if array.dtype != COLUMNS[name].dtype:
            raise DataError(
                f"column {name} has dtype {array.dtype}; expected {np.dtype(COLUMNS[name].dtype)}"
            )
        columns[name] = array
    for name, values in body.objects.items():
        if (
            name not in COLUMNS
            or COLUMNS[name].dtype is not object
            or COLUMNS[name].stored != Stored.SEQUENCES
        ):
            raise DataError(f"object column {name!r} is not known")
        columns[name] = np.fromiter(values, object, count=len(values))
    return columns
