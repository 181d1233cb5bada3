"""The layout of a payload: what encoder and decoder agree on, byte by byte in docs/wire-format.md."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import xxhash

from pellucid.data.rules import Experts
from pellucid.errors import PayloadError

MAGIC = b"PLCD"
VERSION = 2

PREAMBLE = struct.Struct("<4sHHQ")
"""Magic, version, zero, checksum of everything behind it."""

COUNTS = struct.Struct("<QqQQQIHH")
"""Bytes of the payload, step, tokens, sampled, trainable, sequences, sections, bytes of the run id."""

ENTRY = struct.Struct("<24sBBBBIIIQQQ")
"""Directory entry: name, form, dtype, compression, 0, two dimensions, 0, offset, bytes, bytes inflated."""

HEADER_BYTES = PREAMBLE.size + COUNTS.size
ALIGNMENT = 8
"""Sections and the directory start at a multiple of this."""

LENGTHS = ".lengths"
SHARED = ".shared"

Compression = Literal["none", "zstd"]


class Form(IntEnum):
    VALUES = 1
    """One value after the other."""

    TAILS = 2
    """The same without the entries that `.shared` says another sequence has."""

    SPANS = 3
    """uint32 per sequence: how many; then (start, length) pairs of uint32."""

    BITS = 4
    """Every sequence starts a new byte; the first entry is the lowest bit."""

    RUNS = 5
    """uint32 per sequence: how many; then (value, count) pairs of int32."""

    TEXT = 6
    """uint32 per sequence: which; then a msgpack array of the distinct values."""

    BLOBS = 7
    """uint32 per sequence: which; then uint32: how many, and uint64 each: how long; then the bytes."""


NO_DTYPE = 0
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i2"),
    3: np.dtype("<i4"),
    4: np.dtype("<u4"),
    5: np.dtype("<f4"),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Squeeze(IntEnum):
    NONE = 0
    ZSTD = 1
    """Byte planes, each compressed on its own (`pellucid.transport.planes`)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the payloads that a receiver accepts, checked before anything is allocated."""

    max_bytes: int = 1 << 30
    """Size of a payload, and of what it inflates to."""

    max_tokens: int = 1 << 30
    max_sequences: int = 1 << 20
    max_text_bytes: int = 16_384
    """Size of one text, which becomes a Python object."""

    vocab_size: int | None = None
    """Token ids from here on are refused; None takes any."""

    text_only: bool = False
    """Multimodal samples are refused."""

    experts: Experts | None = None
    """Routed experts that a batch must have; None: any, or none."""


UNLIMITED = Limits(1 << 62, 1 << 62, 1 << 31, 1 << 31)
"""For bytes that this very trainer made of samples that it has judged."""


class Refusal(Exception):
    """A payload breaks a rule at a byte; `by` adds who sent it."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason

    def by(self, sender: str) -> PayloadError:
        return PayloadError(sender, self.position, self.reason)


def too_large(num_bytes: int, max_bytes: int) -> str:
    return f"{num_bytes} bytes; at most {max_bytes} are taken (transport.max_batch_bytes)"


def checksum(*chunks: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for chunk in chunks:
        digest.update(chunk)
    return digest.intdigest()


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
