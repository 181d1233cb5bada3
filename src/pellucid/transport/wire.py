"""The payload of one batch: layout, limits and compression. Pure; docs/wire-format.md has it byte by byte.

    header      magic, version, checksum, counts, run id
    directory   one entry per section: name, form, dtype, where, how long
    sections    `.lengths`, `.shared` (prompts that are stored once), and one per column

A section may be compressed. Numbers are cut into byte planes, and each plane is compressed on its own:

    ids      1, 300, 70000     planes  01 2c 70 | 00 01 11 | 00 00 01 | 00 00 00
    floats   -0.1, -0.7        planes  cd 33 | cc 33 | cc 33 | bd bf

The high planes of ids and the exponents of floats have few distinct bytes and shrink well; the low bytes of a
mantissa are noise, and a plane that does not shrink is stored as it is. The decoder knows what a plane
inflates to, and refuses a frame that says otherwise before it takes memory for it.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from pellucid.data import TokenTable
from pellucid.data.rules import Experts
from pellucid.errors import PayloadError, TransportError

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
    """Byte planes, each compressed on its own (`squeeze`)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that one optimizer step of one run trains on."""

    run_id: str
    step: int
    table: TokenTable


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


def check_size(step: int, payload: bytes, max_bytes: int) -> None:
    """Raises TransportError if a batch is too large; the sender calls it, where the cause is."""
    if len(payload) > max_bytes:
        raise TransportError(
            f"the batch of step {step} has {len(payload)} bytes; transport.max_batch_bytes = {max_bytes} "
            "allows no more: raise it on both sides, or send smaller batches"
        )


def batch_refused(step: int, reason: str) -> TransportError:
    """Makes the error that a sender raises for a batch that the trainer refused."""
    return TransportError(
        f"the trainer refused the batch of step {step}: {reason}; go on with --resume, which gives it up and "
        "samples the step anew"
    )


def too_large(num_bytes: int, max_bytes: int) -> str:
    return f"{num_bytes} bytes; at most {max_bytes} are taken (transport.max_batch_bytes)"


def checksum(*chunks: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for chunk in chunks:
        digest.update(chunk)
    return digest.intdigest()


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


# Repeats are rare in planes and cost more than they save: a tiny hash table leaves it to Huffman coding.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, write_content_size=True)
_PROBE = 1 << 16
_MIN_GAIN = 0.03


def count_planes(form: Form, dtype: np.dtype[Any] | None) -> int:
    """As many as a number has bytes; what is not a column of numbers is one plane."""
    return dtype.itemsize if dtype is not None and form in (Form.VALUES, Form.TAILS) else 1


def squeeze(values: NDArray[np.uint8], num_planes: int) -> list[bytes]:
    """Returns the size of each plane, then the planes."""
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    planes = [_squeeze_plane(values[plane::num_planes], compressor) for plane in range(num_planes)]
    return [struct.pack(f"<{num_planes}Q", *map(len, planes)), *planes]


def _squeeze_plane(strided: NDArray[np.uint8], compressor: zstandard.ZstdCompressor) -> bytes:
    plane = np.ascontiguousarray(strided)
    if _looks_like_noise(plane):
        return plane.tobytes()
    frame = compressor.compress(plane.data)
    return frame if len(frame) < plane.size else plane.tobytes()


def _looks_like_noise(plane: NDArray[np.uint8]) -> bool:
    """Whether its bytes, taken one by one, are too evenly spread to gain from."""
    if plane.size < _PROBE:
        return False
    counts = np.bincount(plane[:: plane.size // _PROBE], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) > 8 * (1 - _MIN_GAIN)


def inflate(section: memoryview, num_bytes: int, num_planes: int, position: int) -> NDArray[np.uint8]:
    """`position` is where the section starts in its payload, for what is refused."""
    sizes = _plane_sizes(section, num_planes, position)
    size = num_bytes // num_planes
    values = np.empty((size, num_planes), np.uint8)
    start = 8 * num_planes
    for plane, stored in enumerate(sizes):
        data = section[start : start + stored]
        values[:, plane] = np.frombuffer(
            data if stored == size else _inflate_plane(data, size, position + start), np.uint8
        )
        start += stored
    return values.reshape(-1)


def _plane_sizes(section: memoryview, num_planes: int, position: int) -> tuple[int, ...]:
    if len(section) < 8 * num_planes:
        raise Refusal(position, f"a compressed section of {len(section)} bytes lacks its plane sizes")
    sizes = struct.unpack_from(f"<{num_planes}Q", section)
    if sum(sizes) != len(section) - 8 * num_planes:
        raise Refusal(
            position, f"planes of {sum(sizes)} bytes in a section with {len(section) - 8 * num_planes}"
        )
    return sizes


def _inflate_plane(data: memoryview, size: int, position: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != size:
            raise Refusal(position, f"a zstd frame says it holds {claimed} bytes; the plane has {size}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refusal(position, f"not a zstd frame: {error}") from error
