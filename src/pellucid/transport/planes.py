"""Compression that knows what it compresses: numbers are cut into byte planes, each squeezed on its own.

    ids      1, 300, 70000     planes  01 2c 70 | 00 01 11 | 00 00 01 | 00 00 00
    floats   -0.1, -0.7        planes  cd 33 | cc 33 | cc 33 | bd bf

The high planes of ids and the exponents of floats have few distinct bytes and shrink well; the low bytes of a
mantissa are noise, and a plane that does not shrink is kept as it is. What a plane inflates to is known
beforehand, so that a frame that says otherwise is refused before memory is taken for it.
"""

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pellucid.transport.wire import Form, Refusal

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
