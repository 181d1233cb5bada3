"""Digests of published weights: `digests.json` of a policy version, one per tensor.

    {"format": 1,
     "tensors": {"model.norm.weight": "F32-6d1f…", …},
     "files": {"model.safetensors": {"num_bytes": 538090000, "head": "6d1f…"}},
     "delta": null}                                                              see `deltas`

- The trainer computes the digest of a tensor from its own copy, as it writes that: xxh3_64 of the bytes as
  published, behind safetensors' name of the dtype.
- A server computes its digests from the tensors that it serves, never from the file. The orchestrator
  compares; see `ledger.weights`.
- `head` is the digest of all bytes of the file before the tensors, or of the whole file if it holds none, so
  that size, head and tensors together hold every byte of a file that came over a network.
"""

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import orjson
import xxhash

from pellucid.data.files import read_whole
from pellucid.errors import DataError, TransportError

DIGESTS = "digests.json"
_MAX_BYTES = 1 << 28


class PublishedFile(msgspec.Struct, frozen=True):
    num_bytes: int
    head: str


class PublishedDelta(msgspec.Struct, frozen=True):
    """A file with the difference from another version; see `deltas`."""

    name: str
    num_bytes: int
    digest: str
    base_version: int
    base: str
    """Digest of the `digests.json` of the version that it starts from."""


class PublishedDigests(msgspec.Struct, frozen=True):
    tensors: dict[str, str]
    files: dict[str, PublishedFile] = {}
    delta: PublishedDelta | None = None
    format: int = 1


class OfferedVersions(msgspec.Struct, frozen=True):
    """`GET /weights` of a trainer that offers its versions over HTTP."""

    versions: dict[int, str]
    """Digest of `digests.json` by version: another one means that the version was published anew."""


class TensorBytes(NamedTuple):
    """A tensor in a safetensors file."""

    dtype: str
    start: int
    """Byte of the first element, from the end of the head."""

    stop: int
    head_bytes: int

    @property
    def itemsize(self) -> int:
        return max(1, int("".join(filter(str.isdigit, self.dtype.partition("_")[0])) or 8) // 8)

    def seek(self, file: BinaryIO) -> int:
        """Goes to the tensor's first byte; returns how many it has."""
        file.seek(self.head_bytes + self.start)
        return self.stop - self.start


def read_head(file: BinaryIO) -> bytes:
    """Returns all bytes of a safetensors file before the tensors."""
    start = file.read(8)
    return start + file.read(min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size))


def tensors_of(head: bytes) -> dict[str, TensorBytes]:
    described = orjson.loads(head[8:])
    described.pop("__metadata__", None)
    return {
        name: TensorBytes(about["dtype"], about["data_offsets"][0], about["data_offsets"][1], len(head))
        for name, about in described.items()
    }


def digest_of_bytes(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def digest_of_tensor(dtype: str, data: bytes | memoryview) -> str:
    """`dtype`: safetensors' name. `digest_of_tensor("F32", b"") == "F32-2d06800538d394c2"`."""
    return f"{dtype}-{xxhash.xxh3_64_hexdigest(data)}"


def write_digests(folder: Path, digests: PublishedDigests) -> None:
    (folder / DIGESTS).write_bytes(msgspec.json.format(msgspec.json.encode(digests), indent=1))


def read_digests(folder: Path) -> PublishedDigests | None:
    """Returns the digests of a policy version; None if it has none: an older trainer wrote it."""
    path = folder / DIGESTS
    try:
        return decode_digests(read_whole(path, _MAX_BYTES), str(path))
    except FileNotFoundError:
        return None
    except (OSError, DataError) as error:
        raise TransportError(f"{path} cannot be read: {error}") from error


def decode_digests(content: bytes, source: str) -> PublishedDigests:
    """Raises TransportError if these are no digests; `source` names them."""
    try:
        digests = msgspec.json.decode(content, type=PublishedDigests)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"{source} holds no digests of weights: {error}") from error
    if digests.format != 1:
        raise TransportError(
            f"{source} has format {digests.format}; this version reads 1, so update pellucid"
        )
    return digests
