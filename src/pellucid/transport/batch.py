"""A batch and its payload: one checksum, one msgpack header, and the bytes of every column.

    preamble    magic, version, checksum, bytes of the payload and of the header
    header      a msgpack map: run, step, counts, and a map per section (`Header`)
    sections    `.lengths`, `.shared` (prompts that are stored once), and one per column, as `sections` has it

Decoding makes views of the payload, and believes nothing that it claims before it is checked: size, magic,
version, length and checksum; the header by its types, its sections against the bytes that are there and the
limits; lengths and counts; every column against those; the rules of samples.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from pellucid.data import COLUMNS, TokenTable
from pellucid.data.rows import CellRows, Rows
from pellucid.data.rules import check_experts, check_images, check_rules, check_text
from pellucid.errors import ColumnError, PayloadError, TransportError
from pellucid.transport.sections import (
    LENGTHS,
    Compression,
    Count,
    EncodedSection,
    Limits,
    Refusal,
    SectionHead,
    SectionReader,
    StoredSection,
    encode_table,
    squeeze,
)

MAGIC = b"PLCD"
VERSION = 3
MAX_HEADER_BYTES = 1 << 16
_MAX_REASON = 800
"""Characters of a refusal's reason: it quotes the payload, and has to fit into one message to its sender."""

PREAMBLE = struct.Struct("<4sIQQQ")
"""Magic, version, checksum of everything behind it, bytes of the payload, bytes of the header."""

SEALED_FROM = 16
"""The first byte that the checksum covers."""

_UNLIMITED = Limits(1 << 62, 1 << 62, 1 << 31, 1 << 31)
"""For bytes that this very trainer received, or made of samples that it has judged."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_id: str
    step: Count
    num_sequences: Count
    num_tokens: Count
    num_sampled: Count
    num_trainable: Count
    sections: list[SectionHead]
    """In the order of their bytes; each starts at the next multiple of 8."""


_HEADER = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that one optimizer step of one run trains on.

    A batch is pickled as its payload: the ranks of a trainer get the bytes that the main rank received.
    """

    run_id: str
    step: int
    table: TokenTable
    payload: bytes | memoryview | None = field(default=None, repr=False, compare=False)
    """The bytes that it was decoded from; None for a batch made in this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        payload = encode_batch(self) if self.payload is None else bytes(self.payload)
        return _decode_judged, (payload,)


def _decode_judged(payload: bytes) -> Batch:
    """Decodes a payload of the main process, which has judged it by its own limits."""
    return decode_batch(payload, sender="the main process", limits=_UNLIMITED)


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


def declared_checksum(payload: bytes | memoryview) -> int | None:
    """Returns the checksum that the first bytes of a payload name; None if they are too few."""
    return int(PREAMBLE.unpack_from(payload)[2]) if len(payload) >= PREAMBLE.size else None


def checksum(*chunks: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for chunk in chunks:
        digest.update(chunk)
    return digest.intdigest()


def _padding(position: int) -> int:
    """Returns the number of bytes up to the next multiple of 8, where a section may start."""
    return -position % 8


def encode_batch(batch: Batch, *, compression: Compression = "none") -> bytes:
    sections = list(encode_table(batch.table))
    if compression == "zstd":
        sections = [squeeze(section) for section in sections]
    return assemble(batch, sections)


def assemble(batch: Batch, sections: list[EncodedSection]) -> bytes:
    table = batch.table
    counts = (table.num_sequences, table.num_tokens, table.num_sampled, table.num_trainable)
    header = Header(batch.run_id, batch.step, *counts, [each.section for each in sections])
    head = msgspec.msgpack.encode(header)
    body = [head, bytes(_padding(len(head)))]
    for each in sections:
        body += [*each.chunks, bytes(_padding(each.section.num_stored))]
    stored = sum(each.section.num_stored + _padding(each.section.num_stored) for each in sections)
    sizes = struct.pack("<QQ", PREAMBLE.size + len(head) + len(body[1]) + stored, len(head))
    return b"".join([struct.pack("<4sIQ", MAGIC, VERSION, checksum(sizes, *body)), sizes, *body])


def decode_batch(payload: bytes | memoryview, *, sender: str, limits: Limits | None = None) -> Batch:
    """Decodes a payload; the error for a bad one names `sender`."""
    try:
        return _decode(memoryview(payload).cast("B"), limits or Limits())
    except Refusal as refusal:
        raise PayloadError(sender, refusal.position, _printable(refusal.reason)) from None


def _printable(reason: str) -> str:
    """Escapes what would end or colour a line of the log, and cuts a reason that is too long."""
    escaped = "".join(each if each.isprintable() else repr(each)[1:-1] for each in reason[: _MAX_REASON + 1])
    return escaped if len(escaped) <= _MAX_REASON else f"{escaped[: _MAX_REASON - 1]}…"


def _decode(payload: memoryview, limits: Limits) -> Batch:
    header, start = _read_header(payload, limits)
    sections = _locate(payload, header, start, limits)
    reader = SectionReader(sections, header.num_sequences, limits)
    columns = reader.read(header.num_tokens, header.num_sampled, header.num_trainable)
    try:
        check_rules(columns)
        if limits.text_only:
            check_text(columns)
        if limits.images is not None:
            check_images(columns, limits.images)
        if limits.experts is not None:
            check_experts(columns, limits.experts)
        _check_run(columns, header.run_id)
    except ColumnError as error:
        position = sections[error.column].offset if error.column in sections else PREAMBLE.size
        raise Refusal(position, str(error)) from error
    table = TokenTable.of_rows(columns["token_ids"].lengths, columns)
    return Batch(header.run_id, header.step, table, payload)


def _check_run(columns: Mapping[str, Rows], run_id: str) -> None:
    """Refuses a batch with samples of another run than its header names: books are kept by run."""
    rows = columns.get("run_id")
    if not run_id or rows is None:
        return
    assert isinstance(rows, CellRows)
    if not set(rows.cells.tolist()) <= {"", run_id}:
        for row, found in enumerate(rows.array.tolist()):
            if found not in ("", run_id):
                raise ColumnError("run_id", row, f"is {found!r}, another run than the batch's, {run_id!r}")


def _read_header(payload: memoryview, limits: Limits) -> tuple[Header, int]:
    """Returns the header and the byte at which the first section starts."""
    if len(payload) > limits.max_bytes:
        raise Refusal(0, limits.too_large(len(payload)))
    if len(payload) < PREAMBLE.size:
        raise Refusal(len(payload), f"ends here; the preamble alone has {PREAMBLE.size} bytes")
    magic, version, expected, num_bytes, header_bytes = PREAMBLE.unpack_from(payload)
    if magic != MAGIC:
        raise Refusal(0, f"starts with {magic!r}; expected {MAGIC!r}")
    if version != VERSION:
        raise Refusal(4, f"format version {version}; this pellucid reads {VERSION}; update both ends")
    if num_bytes != len(payload):
        raise Refusal(SEALED_FROM, f"says it has {num_bytes} bytes, but {len(payload)} arrived")
    if (found := checksum(payload[SEALED_FROM:])) != expected:
        raise Refusal(8, f"checksum {expected:016x}, but the content gives {found:016x}")
    end = PREAMBLE.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(payload):
        raise Refusal(24, f"a header of {header_bytes} bytes is too long, or reaches beyond the end")
    try:
        header = _HEADER.decode(payload[PREAMBLE.size : end])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(PREAMBLE.size, f"header: {error}") from error
    if header.num_tokens > limits.max_tokens:
        raise Refusal(PREAMBLE.size, f"{header.num_tokens} tokens; at most {limits.max_tokens} are taken")
    if not 1 <= header.num_sequences <= limits.max_sequences:
        allowed = f"1 to {limits.max_sequences} are taken"
        raise Refusal(PREAMBLE.size, f"{header.num_sequences} sequences; {allowed}")
    return header, end + _padding(end)


def _locate(payload: memoryview, header: Header, start: int, limits: Limits) -> dict[str, StoredSection]:
    """Finds the bytes of every section; refuses any that the column, the limits or the payload forbid."""
    sections: dict[str, StoredSection] = {}
    num_inflated = 0
    for section in header.sections:
        end = start + section.num_stored
        found = StoredSection(section, min(start, len(payload)), payload[start:end])
        found.check_declaration()
        if section.name in sections:
            raise found.refuse("is there twice")
        if end > len(payload):
            raise found.refuse(f"{section.num_stored} bytes reach beyond the end")
        num_inflated += section.num_bytes
        if num_inflated > limits.max_bytes:
            raise found.refuse(f"inflates to {limits.too_large(num_inflated)}")
        sections[section.name] = found
        start = end + _padding(end)
    if start != len(payload):
        raise Refusal(min(start, len(payload)), f"sections end at {start}, but {len(payload)} bytes arrived")
    for name in [LENGTHS, *(name for name, column in COLUMNS.items() if column.required)]:
        if name not in sections:
            raise Refusal(PREAMBLE.size, f"lacks the section {name}")
    return sections
