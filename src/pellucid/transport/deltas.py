"""A policy version as its difference from the one before: `delta.safetensors.zst` beside the whole file.

In bfloat16 an update of 1e-6 leaves most elements as they were. Per tensor with a changed element:

    NAME.gaps      U8   unchanged elements before each changed one; 255: that many more, and no change yet
    NAME.changes   U8   new bits − old bits of each, zigzag, lowest bytes of all first

    old  5 5 5 5 5 5        gaps  1 3        changes  2 1 0 0       (bfloat16: two bytes each)
    new  5 6 5 5 5 4

- The file is safetensors in a zstd frame; `digests.json` has its size, its digest, and the version that it
  starts from, known by the digest of that version's `digests.json`.
- Whoever applies it holds the result to the digests of the whole file, so a difference never passes for
  something else. Several in a row give what the last one gives.
- Where it would be more than half of the whole file (float32, a first version, another head), there is none.
"""

import logging
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save

from pellucid.errors import TransportError
from pellucid.transport.digests import (
    DIGESTS,
    PublishedDelta,
    TensorBytes,
    digest_of_bytes,
    read_digests,
    read_head,
    tensors_of,
    write_digests,
)
from pellucid.transport.spool import is_stable

log = logging.getLogger(__name__)

DELTA = "delta.safetensors.zst"
_LARGEST = 0.5
"""Share of the whole file's bytes up to which a difference is kept."""

_LEVEL = 1
_ESCAPE = 255
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]


def add_delta(folder: Path, base: Path, base_version: int) -> bool:
    """Writes the difference of the version in `folder` from the one in `base` beside it, if that is worth it.

    Returns whether it did. Readers do not see `folder` yet. A base that is damaged is none.
    """
    try:
        about, before = read_digests(folder), read_digests(base) if is_stable(base) else None
        if about is None or before is None or about.files != before.files or len(about.files) != 1:
            return False  # another head, or another size
        (name,) = about.files
        changed = {key for key, digest in about.tensors.items() if before.tensors.get(key) != digest}
        payload = _difference(base / name, folder / name, changed)
    except (TransportError, FileNotFoundError, ValueError) as error:
        log.warning("no difference from policy version %d: %s", base_version, error)
        return False
    if payload is None:
        return False
    (folder / DELTA).write_bytes(payload)
    delta = PublishedDelta(
        DELTA,
        len(payload),
        digest_of_bytes(payload),
        base_version,
        digest_of_bytes((base / DIGESTS).read_bytes()),
    )
    write_digests(folder, msgspec.structs.replace(about, delta=delta))
    return True


def _difference(old: Path, new: Path, changed: set[str]) -> bytes | None:
    largest = _LARGEST * new.stat().st_size
    parts: dict[str, Bytes] = {}
    num_bytes = 0
    with old.open("rb") as before, new.open("rb") as after:
        tensors = tensors_of(read_head(after))
        rooms = _room(tensors), _room(tensors)
        for name in sorted(tensors.keys() & changed):
            both = zip((before, after), rooms, strict=True)
            found = encode(*(_read(each, tensors[name], room) for each, room in both))
            num_bytes += sum(each.nbytes for each in found)
            if num_bytes > 4 * largest:
                return None
            parts[f"{name}.gaps"], parts[f"{name}.changes"] = found
    payload = zstandard.compress(save(parts), _LEVEL)
    return payload if len(payload) <= largest else None


def _room(tensors: Mapping[str, TensorBytes]) -> Bytes:
    """Memory for the largest tensor: new memory for each would cost as much time as reading it."""
    return np.empty(max((each.stop - each.start for each in tensors.values()), default=0), np.uint8)


def _read(file: BufferedReader, tensor: TensorBytes, room: Bytes) -> Words:
    """Reads a tensor into `room`, and returns its elements there as unsigned numbers."""
    data = room[: tensor.seek(file)]
    if file.readinto(data.data) < len(data):
        raise ValueError(f"{file.name} ends within a tensor")
    return data.view(f"<u{tensor.itemsize}")


def encode(old: Words, new: Words) -> tuple[Bytes, Bytes]:
    """Returns gaps and changes."""
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    coded = np.full(ends[-1] + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    coded[ends] = gaps % _ESCAPE
    signed = (new[places] - old[places]).view(f"<i{old.itemsize}")
    zigzag = ((signed << 1) ^ (signed >> (8 * old.itemsize - 1))).view(np.uint8)
    return coded, np.ascontiguousarray(zigzag.reshape(-1, old.itemsize).T).reshape(-1)


def decode(words: Words, gaps: Bytes, changes: Bytes) -> None:
    """Changes `words` in place; raises ValueError if the two do not fit them."""
    ends = np.flatnonzero(gaps != _ESCAPE)
    places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(changes) != len(places) * words.itemsize or (len(places) and places[-1] >= len(words)):
        raise ValueError(f"{len(places)} changes in {len(changes)} bytes, for {len(words)} elements")
    planes = np.ascontiguousarray(changes.reshape(words.itemsize, -1).T)
    zigzag = planes.reshape(-1).view(words.dtype)
    words[places] += (zigzag >> 1) ^ (0 - (zigzag & 1))


def apply_deltas(base: Path, payloads: Sequence[bytes], target: Path) -> None:
    """Writes the file that follows from `base` by the differences, one after the other.

    Raises TransportError if they are none. What it writes has to be held to the digests of the version.
    """
    with base.open("rb") as old, target.open("wb") as new:
        head = read_head(old)
        tensors = tensors_of(head)
        room = _room(tensors)
        new.write(head)
        try:
            differences = [_decompress(payload, base) for payload in payloads]
            for name, about in sorted(tensors.items(), key=lambda item: item[1].start):
                words = _read(old, about, room)
                for parts in differences:
                    if f"{name}.gaps" in parts:
                        decode(words, parts[f"{name}.gaps"], parts[f"{name}.changes"])
                new.write(words.data)
        except (zstandard.ZstdError, SafetensorError, KeyError, ValueError) as error:
            raise TransportError(f"the difference from {base.parent} is damaged: {error}") from error


def _decompress(payload: bytes, base: Path) -> dict[str, Bytes]:
    if zstandard.frame_content_size(payload) > 4 * base.stat().st_size:
        raise ValueError("it is larger than any difference")
    parts: dict[str, Bytes] = load(zstandard.decompress(payload))
    return parts
