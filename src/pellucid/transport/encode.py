"""Batch -> bytes. Every value is copied once, from the sample that has it into the payload."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.data import COLUMNS, TokenTable
from pellucid.data.rows import (
    BitRows,
    CellRows,
    Integers,
    MaskRows,
    Pieces,
    Prefixes,
    RunRows,
    SpanRows,
    ValueRows,
    offsets_of,
)
from pellucid.transport.wire import (
    COUNTS,
    DTYPE_CODES,
    ENTRY,
    HEADER_BYTES,
    LENGTHS,
    MAGIC,
    NO_DTYPE,
    PREAMBLE,
    SHARED,
    VERSION,
    Batch,
    Compression,
    Form,
    Squeeze,
    aligned,
    checksum,
    count_planes,
    squeeze,
)


@dataclass(frozen=True, slots=True)
class _EncodedSection:
    name: str
    form: Form
    chunks: Sequence[Any]
    """Bytes, in order."""

    dtype: np.dtype[Any] | None = None
    dims: tuple[int, ...] = ()
    squeezed: int | None = None
    """Bytes before compression."""

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


def encode_batch(batch: Batch, *, compression: Compression = "none") -> bytes:
    """Prompts that the members of a group share are written once."""
    sections = list(_sections(batch.table))
    if compression == "zstd":
        sections = [_squeezed(section) for section in sections]
    return _assemble(batch, sections)


def _sections(table: TokenTable) -> Iterator[_EncodedSection]:
    yield _values(LENGTHS, table.lengths.astype("<u4"))
    prefixes = find_shared_prompts(table)
    if prefixes is not None:
        yield _values(SHARED, np.stack([prefixes.owners, prefixes.lengths], axis=1).astype("<u4"))
    as_bits = _smaller_as_bits(table)
    for name, rows in table.columns.items():
        if isinstance(rows, MaskRows):
            yield _bits(name, rows) if as_bits else _spans(name, rows)
        elif isinstance(rows, RunRows):
            yield _pairs(name, Form.RUNS, rows.num_runs, rows.runs, rows.dtype)
        elif isinstance(rows, CellRows):
            yield _cells(name, rows)
        elif isinstance(rows, ValueRows):
            yield _value_section(name, rows, prefixes)


def find_shared_prompts(table: TokenTable) -> Prefixes | None:
    """Sequences that start with the same prompt as an earlier one of their group.

    A prompt is what comes before the first sampled token.
    """
    if not table.has("group_id"):
        return None
    ids, sampled = table.columns["token_ids"], table.columns["sampled"]
    assert isinstance(ids, ValueRows) and isinstance(sampled, MaskRows)
    first: dict[tuple[str, int], tuple[int, bytes]] = {}
    owners, lengths = np.arange(table.num_sequences), np.zeros(table.num_sequences, np.int64)
    rows = zip(table["group_id"].tolist(), sampled.first_true.tolist(), ids.pieces(), strict=True)
    for row, (group, length, pieces) in enumerate(rows):
        if not group or not length:
            continue
        prompt = _head(pieces, length)
        owner, known = first.setdefault((group, length), (row, prompt))
        if owner != row and prompt == known:
            owners[row], lengths[row] = owner, length
    return Prefixes(owners, lengths) if lengths.any() else None


def _head(pieces: Pieces, length: int) -> bytes:
    if len(pieces[0]) >= length:
        return pieces[0][:length].tobytes()
    return np.concatenate(pieces)[:length].tobytes()


def _value_section(name: str, rows: ValueRows, prefixes: Prefixes | None) -> _EncodedSection:
    if prefixes is None or not COLUMNS[name].shares_prompts or not _agree(name, rows, prefixes):
        return _EncodedSection(name, Form.VALUES, rows.all_pieces(), rows.dtype, rows.dims)
    tails = [
        piece
        for pieces, skip in zip(rows.pieces(), prefixes.lengths.tolist(), strict=True)
        for piece in _tail(pieces, skip)
    ]
    return _EncodedSection(name, Form.TAILS, tails, rows.dtype, rows.dims)


def _agree(name: str, rows: ValueRows, prefixes: Prefixes) -> bool:
    """Token ids were compared already; another column may differ between the members of a group."""
    if name == "token_ids":
        return True
    pieces = rows.pieces()
    shared = zip(pieces, prefixes.owners.tolist(), prefixes.lengths.tolist(), strict=True)
    return all(_head(row, length) == _head(pieces[owner], length) for row, owner, length in shared if length)


def _tail(pieces: Pieces, skip: int) -> Pieces:
    """Without the first `skip` entries, which may reach into the second piece."""
    if len(pieces[0]) >= skip:
        return (pieces[0][skip:], *pieces[1:])
    return (pieces[1][skip - len(pieces[0]) :],)


def _smaller_as_bits(table: TokenTable) -> bool:
    """Both masks take the same form."""
    masks = [rows for rows in table.columns.values() if isinstance(rows, MaskRows)]
    if any(isinstance(rows, BitRows) for rows in masks):
        return True
    num_spans = sum(len(rows.spans) for rows in masks if isinstance(rows, SpanRows))
    return num_spans * 8 > len(masks) * table.num_tokens / 8


def _spans(name: str, rows: MaskRows) -> _EncodedSection:
    assert isinstance(rows, SpanRows)
    return _pairs(name, Form.SPANS, rows.num_spans, rows.spans.astype("<u4", copy=False), None)


def _bits(name: str, rows: MaskRows) -> _EncodedSection:
    if isinstance(rows, BitRows):
        return _EncodedSection(name, Form.BITS, [rows.bits])
    offsets = offsets_of(rows.lengths).tolist()
    mask = rows.array
    packed = [np.packbits(mask[start:stop], bitorder="little") for start, stop in pairwise(offsets)]
    return _EncodedSection(name, Form.BITS, packed)


def _pairs(
    name: str, form: Form, counts: Integers, pairs: NDArray[Any], dtype: np.dtype[Any] | None
) -> _EncodedSection:
    return _EncodedSection(name, form, [counts.astype("<u4"), np.ascontiguousarray(pairs)], dtype)


def _values(name: str, values: NDArray[Any]) -> _EncodedSection:
    return _EncodedSection(name, Form.VALUES, [values], values.dtype, values.shape[1:])


def _cells(name: str, rows: CellRows) -> _EncodedSection:
    column = COLUMNS[name]
    if column.is_number:
        return _values(name, rows.array)
    cells = rows.array.tolist()
    if column.dtype not in (bytes, str):  # role spans, which cannot be keys
        codes = np.arange(len(cells), dtype="<u4")
        return _EncodedSection(name, Form.TEXT, [codes, msgspec.msgpack.encode(cells)])
    which = {cell: code for code, cell in enumerate(dict.fromkeys(cells))}
    codes = np.array([which[cell] for cell in cells], "<u4")
    if column.dtype is str:
        return _EncodedSection(name, Form.TEXT, [codes, msgspec.msgpack.encode(list(which))])
    sizes = np.array([len(cell) for cell in which], "<u8")
    return _EncodedSection(name, Form.BLOBS, [codes, np.array([len(which)], "<u4"), sizes, *which])


def _squeezed(section: _EncodedSection) -> _EncodedSection:
    raw = np.concatenate(
        [np.zeros(0, np.uint8), *(np.frombuffer(chunk, np.uint8) for chunk in section.chunks)]
    )
    planes = squeeze(raw, count_planes(section.form, section.dtype))
    if sum(map(len, planes)) >= raw.size:
        return section
    return replace(section, chunks=planes, squeezed=raw.size)


def _assemble(batch: Batch, sections: Sequence[_EncodedSection]) -> bytes:
    table, run_id = batch.table, batch.run_id.encode()
    start = aligned(HEADER_BYTES + len(run_id))
    position = start + ENTRY.size * len(sections)
    entries, body = [], []
    for section in sections:
        num_bytes = section.num_bytes
        entries.append(_entry(section, position, num_bytes))
        end = aligned(position + num_bytes)
        body += [*section.chunks, bytes(end - position - num_bytes)]
        position = end
    counts = COUNTS.pack(
        position,
        batch.step,
        table.num_tokens,
        table.num_sampled,
        table.num_trainable,
        table.num_sequences,
        len(sections),
        len(run_id),
    )
    head = counts + run_id.ljust(start - HEADER_BYTES, b"\0") + b"".join(entries)
    return b"".join([PREAMBLE.pack(MAGIC, VERSION, 0, checksum(head, *body)), head, *body])


def _entry(section: _EncodedSection, offset: int, num_bytes: int) -> bytes:
    dims = (*section.dims, 0, 0)[:2]
    return ENTRY.pack(
        section.name.encode(),
        section.form,
        NO_DTYPE if section.dtype is None else DTYPE_CODES[section.dtype],
        Squeeze.NONE if section.squeezed is None else Squeeze.ZSTD,
        0,
        *dims,
        0,
        offset,
        num_bytes,
        num_bytes if section.squeezed is None else section.squeezed,
    )
