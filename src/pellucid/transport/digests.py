"""Digests of published weights: `digests.json` of a policy version, one per tensor.

    {"format": 1,
     "tensors": {"model.norm.weight": "F32-6d1f…", …},
     "files": {"model.safetensors": {"num_bytes": 538090000, "head": "6d1f…"}}}

- The trainer computes the digest of a tensor from its own copy, as it writes that: xxh3_64 of the bytes as
  published, behind safetensors' name of the dtype.
- A server computes its digests from the tensors that it serves, never from the file. The orchestrator
  compares; see `ledger.weights`.
- `head` is the digest of all bytes of the file before the tensors, or of the whole file if it holds none, so
  that size, head and tensors together hold every byte of a file that came over a network.
"""

from pathlib import Path

import msgspec
import xxhash

from pellucid.data.files import read_whole
from pellucid.errors import DataError, TransportError

DIGESTS = "digests.json"
_MAX_BYTES = 1 << 28


class PublishedFile(msgspec.Struct, frozen=True):
    num_bytes: int
    head: str


class PublishedDigests(msgspec.Struct, frozen=True):
    tensors: dict[str, str]
    files: dict[str, PublishedFile] = {}
    format: int = 1


class OfferedVersions(msgspec.Struct, frozen=True):
    """`GET /weights` of a trainer that offers its versions over HTTP."""

    versions: dict[int, str]
    """Digest of `digests.json` by version: another one means that the version was published anew."""


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
