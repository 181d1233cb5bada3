"""The columns of a batch as sections of bytes; docs/wire-format.md describes them. Pure.

    ids      1, 300, 70000     planes  01 2c 70 | 00 01 11 | 00 00 01 | 00 00 00
    floats   -0.1, -0.7        planes  cd 33 | cc 33 | cc 33 | bd bf

A section may be compressed. Numbers are cut into byte planes, each compressed on its own: the high planes of
ids and the exponents of floats shrink well; the low bytes of a mantissa are noise, and a plane that does not
shrink is stored as it is. The reader knows what a plane inflates to, and refuses a frame that says otherwise
before it takes memory for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from pellucid.data import COLUMNS, Axis, Column, TokenTable
from pellucid.data.images import ImageShape
from pellucid.data.packed import PAIR_BYTES, RUN, SPAN
from pellucid.data.rows import (
    BitRows,
    CellRows,
    FlatRows,
    Integers,
    MaskRows,
    Pieces,
    Prefixes,
    Rows,
    RunRows,
    SpanRows,
    ValueRows,
    offsets_of,
    sum_rows,
)
from pellucid.data.rules import Experts
from pellucid.data.schema import Encoding, RoleSpans

LENGTHS = ".lengths"
SHARED = ".shared"
_SPECIAL = (LENGTHS, SHARED)
_OBJECT_BYTES = 256
"""Upper bound on the memory of one role span."""

Compression = Literal["none", "zstd"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Form(StrEnum):
    VALUES = "values"
    """One value after the other."""

    TAILS = "tails"
    """The same without the entries that `.shared` says another sequence has."""

    SPANS = "spans"
    """uint32 per sequence: how many; then (start, length) pairs of uint32."""

    BITS = "bits"
    """Every sequence starts a new byte; the first entry is the lowest bit."""

    RUNS = "runs"
    """uint32 per sequence: how many; then (value, count) pairs of int32."""

    CODES = "codes"
    """uint32 per sequence: which; then a msgpack array of the distinct values."""


_FORMS = {
    Encoding.RAW: {Form.VALUES},
    Encoding.SPANS: {Form.SPANS, Form.BITS},
    Encoding.RUNS: {Form.RUNS, Form.VALUES},
}


class SectionHead(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One section as the header of a payload describes it."""

    name: str
    form: Form
    num_bytes: Count
    """Bytes before compression."""

    dtype: Literal["uint8", "int16", "int32", "uint32", "float32"] | None = None
    dims: tuple[Count, ...] = ()
    """Shape of an entry that is more than one number."""

    planes: tuple[Count, ...] = ()
    """Stored bytes of each plane of a compressed section."""

    @property
    def num_stored(self) -> int:
        return sum(self.planes) if self.planes else self.num_bytes

    @property
    def num_planes(self) -> int:
        """As many as a number has bytes; what is not a column of numbers is one plane."""
        is_numbers = self.dtype is not None and self.form in (Form.VALUES, Form.TAILS)
        return np.dtype(self.dtype).itemsize if is_numbers else 1


class Refusal(Exception):
    """A payload breaks a rule at a byte."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason


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

    images: ImageShape | None = None
    """How images become tokens, which samples with images are compared with; None: they are not."""

    experts: Experts | None = None
    """Routed experts that a batch must have; None: any, or none."""

    def too_large(self, num_bytes: int) -> str:
        return f"{num_bytes} bytes; at most {self.max_bytes} are taken (transport.max_batch_bytes)"


def declared(name: str) -> tuple[set[Form], set[str | None], int]:
    """Returns the forms and dtypes that a section may have, and how many dimensions an entry has."""
    if name in _SPECIAL:
        return {Form.VALUES}, {"uint32"}, 0
    column = COLUMNS[name]
    if not column.is_number:
        return {Form.CODES}, {None}, 0
    if column.encoding is Encoding.SPANS:
        return _FORMS[column.encoding], {None}, 0
    forms = _FORMS[column.encoding] | ({Form.TAILS} if column.shares_prompts else set())
    kinds = [kind for kind in (column.dtype, column.narrow) if kind is not None]
    return forms, {np.dtype(kind).name for kind in kinds}, len(column.dims)


# Table -> sections


@dataclass(frozen=True, slots=True)
class EncodedSection:
    section: SectionHead
    chunks: Sequence[Any]
    """The stored bytes, in order."""


def encode_table(table: TokenTable) -> Iterator[EncodedSection]:
    """Prompts that the members of a group share are written once; every value is copied by the caller."""
    yield _encoded(LENGTHS, Form.VALUES, [table.lengths.astype("<u4")], "uint32")
    prefixes = find_shared_prompts(table)
    if prefixes is not None:
        pairs = np.stack([prefixes.owners, prefixes.lengths], axis=1).astype("<u4")
        yield _encoded(SHARED, Form.VALUES, [pairs], "uint32")
    as_bits = _smaller_as_bits(table)
    for name, rows in ((name, table.columns[name]) for name in COLUMNS if name in table):
        if isinstance(rows, MaskRows) and as_bits:
            yield _encoded(name, Form.BITS, _bits(rows))
        elif isinstance(rows, SpanRows):
            pairs = np.ascontiguousarray(rows.spans.astype(SPAN, copy=False))
            yield _encoded(name, Form.SPANS, [rows.num_spans.astype("<u4"), pairs])
        elif isinstance(rows, RunRows):
            runs = np.ascontiguousarray(rows.runs)
            yield _encoded(name, Form.RUNS, [rows.num_runs.astype("<u4"), runs], rows.dtype.name)
        elif isinstance(rows, CellRows) and COLUMNS[name].is_number:
            yield _encoded(name, Form.VALUES, [rows.array], rows.array.dtype.name)
        elif isinstance(rows, CellRows):
            yield _encoded(name, Form.CODES, _codes(rows.array.tolist()))
        elif isinstance(rows, ValueRows):
            tails = None if prefixes is None else _tails(name, rows, prefixes)
            form = Form.VALUES if tails is None else Form.TAILS
            yield _encoded(name, form, tails or rows.all_pieces(), rows.dtype.name, rows.dims)


def _encoded(
    name: str, form: Form, chunks: Sequence[Any], dtype: Any = None, dims: tuple[int, ...] = ()
) -> EncodedSection:
    num_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
    return EncodedSection(SectionHead(name, form, num_bytes, dtype, dims), chunks)


def find_shared_prompts(table: TokenTable) -> Prefixes | None:
    """Sequences that start with the same prompt as an earlier one of their group.

    A prompt is what comes before the first sampled token.
    """
    if "group_id" not in table:
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
    whole = pieces[0] if len(pieces[0]) >= length else np.concatenate(pieces)
    return whole[:length].tobytes()


def _tails(name: str, rows: ValueRows, prefixes: Prefixes) -> list[NDArray[Any]] | None:
    """The rows without their shared prompts; None if this column is not equal on all of them.

    Token ids were compared already; another column may differ between the members of a group.
    """
    if not COLUMNS[name].shares_prompts:
        return None
    pieces, skipped = rows.pieces(), prefixes.lengths.tolist()
    if name != "token_ids":
        for row, owner, length in zip(pieces, prefixes.owners.tolist(), skipped, strict=True):
            if length and _head(row, length) != _head(pieces[owner], length):
                return None
    tails = []
    for row, length in zip(pieces, skipped, strict=True):
        for piece in row:
            tails.append(piece[length:])
            length = max(0, length - len(piece))
    return tails


def _smaller_as_bits(table: TokenTable) -> bool:
    """Both masks take the same form."""
    masks = [rows for rows in table.columns.values() if isinstance(rows, MaskRows)]
    num_spans = sum(len(rows.spans) for rows in masks if isinstance(rows, SpanRows))
    has_bits = any(isinstance(rows, BitRows) for rows in masks)
    return has_bits or num_spans * 8 > len(masks) * table.num_tokens / 8


def _bits(rows: MaskRows) -> list[NDArray[np.uint8]]:
    if isinstance(rows, BitRows):
        return [rows.bits]
    bounds = pairwise(offsets_of(rows.lengths).tolist())
    return [np.packbits(rows.array[start:stop], bitorder="little") for start, stop in bounds]


def _codes(cells: list[Any]) -> list[Any]:
    if cells and isinstance(cells[0], str | bytes):
        codes = {cell: code for code, cell in enumerate(dict.fromkeys(cells))}
        return [np.array([codes[cell] for cell in cells], "<u4"), msgspec.msgpack.encode(list(codes))]
    return [np.arange(len(cells), dtype="<u4"), msgspec.msgpack.encode(cells)]  # role spans cannot be keys


# Compression

# Repeats are rare in planes and cost more than they save: a tiny hash table leaves it to Huffman coding.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, write_content_size=True)
_PROBE = 1 << 16
_MIN_GAIN = 0.03


def squeeze(encoded: EncodedSection) -> EncodedSection:
    """Compresses a section plane by plane; one that does not shrink stays as it is."""
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    raw = np.frombuffer(b"".join(encoded.chunks), np.uint8)
    step = encoded.section.num_planes
    planes = [_squeeze_plane(np.ascontiguousarray(raw[n::step]), compressor) for n in range(step)]
    sizes = tuple(map(len, planes))
    if sum(sizes) >= raw.size:
        return encoded
    return EncodedSection(msgspec.structs.replace(encoded.section, planes=sizes), planes)


def _squeeze_plane(plane: NDArray[np.uint8], compressor: zstandard.ZstdCompressor) -> bytes:
    if plane.size >= _PROBE:
        counts = np.bincount(plane[:: plane.size // _PROBE], minlength=256)
        shares = counts[counts > 0] / counts.sum()
        if -(shares * np.log2(shares)).sum() > 8 * (1 - _MIN_GAIN):  # its bytes are too evenly spread
            return plane.tobytes()
    frame = compressor.compress(plane.data)
    return frame if len(frame) < plane.size else plane.tobytes()


def _inflate(section: SectionHead, stored: memoryview, position: int) -> NDArray[np.uint8]:
    size = section.num_bytes // section.num_planes
    values, start = np.empty((size, section.num_planes), np.uint8), 0
    for plane, num_stored in enumerate(section.planes):
        data: memoryview | bytes = stored[start : start + num_stored]
        if num_stored != size:
            data = _inflate_plane(data, size, position + start)
        values[:, plane] = np.frombuffer(data, np.uint8)
        start += num_stored
    return values.reshape(-1)


def _inflate_plane(data: memoryview | bytes, size: int, position: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != size:
            raise Refusal(position, f"a zstd frame says it holds {claimed} bytes; the plane has {size}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refusal(position, f"not a zstd frame: {error}") from error


# Sections -> rows


@dataclass(frozen=True, slots=True)
class StoredSection:
    """A section and its bytes in a payload."""

    section: SectionHead
    offset: int
    stored: memoryview

    def content(self) -> NDArray[np.uint8]:
        if self.section.planes:
            return _inflate(self.section, self.stored, self.offset)
        return np.frombuffer(self.stored, np.uint8)

    def refuse(self, reason: str) -> Refusal:
        return Refusal(self.offset, f"{self.section.name}: {reason}")

    def expect(self, num_bytes: int) -> None:
        if self.section.num_bytes != num_bytes:
            raise self.refuse(f"{self.section.num_bytes} bytes; expected {num_bytes}")

    def check_declaration(self) -> None:
        """Compares form, dtype, dimensions and planes with what the column declares."""
        section = self.section
        if section.name not in COLUMNS and section.name not in _SPECIAL:
            raise Refusal(self.offset, f"section {section.name!r} is not known")
        forms, dtypes, num_dims = declared(section.name)
        if section.form not in forms:
            raise self.refuse(f"form {section.form.value} does not go with it")
        if section.dtype not in dtypes:
            raise self.refuse(f"dtype {section.dtype} does not go with it")
        if len(section.dims) != num_dims or 0 in section.dims:
            raise self.refuse(f"dimensions {section.dims} do not go with it")
        if section.planes and len(section.planes) != section.num_planes:
            raise self.refuse(f"{len(section.planes)} planes; expected {section.num_planes}")


class SectionReader:
    """Sections as rows, once lengths and masks are known to be consistent."""

    def __init__(self, sections: Mapping[str, StoredSection], num_rows: int, limits: Limits) -> None:
        self._sections = sections
        self._limits = limits
        self._num_rows = num_rows
        self._lengths: dict[Axis, Integers] = {Axis.SEQUENCES: np.ones(num_rows, np.int64)}

    def read(self, num_tokens: int, num_sampled: int, num_trainable: int) -> dict[str, Rows]:
        """Returns the columns; refuses those that do not have these numbers of tokens."""
        self._lengths[Axis.TOKENS] = self._read_lengths(num_tokens)
        prefixes = self._read_shared() if SHARED in self._sections else None
        masks = {name: self._read_mask(self._sections[name]) for name in ("sampled", "loss_mask")}
        for (name, mask), expected in zip(masks.items(), (num_sampled, num_trainable), strict=True):
            if (total := int(mask.counts.sum())) != expected:
                raise self._sections[name].refuse(f"{total} tokens; the header says {expected}")
        self._lengths[Axis.SAMPLED] = masks["sampled"].counts
        if type(masks["sampled"]) is not type(masks["loss_mask"]):
            raise self._sections["loss_mask"].refuse("has another form than sampled")
        return {
            name: masks.get(name) or self._read_column(column, self._sections[name], prefixes)
            for name, column in COLUMNS.items()
            if name in self._sections
        }

    def _read_lengths(self, num_tokens: int) -> Integers:
        stored = self._sections[LENGTHS]
        stored.expect(4 * self._num_rows)
        lengths = stored.content().view("<u4").astype(np.int64)
        if (lengths < 1).any():
            raise stored.refuse(f"sequence {np.flatnonzero(lengths < 1)[0]} has no tokens")
        if (total := int(lengths.sum())) != num_tokens:
            raise stored.refuse(f"{total} tokens; the header says {num_tokens}")
        return lengths

    def _read_shared(self) -> Prefixes:
        stored = self._sections[SHARED]
        stored.expect(8 * self._num_rows)
        owners, shared = stored.content().view("<u4").astype(np.int64).reshape(-1, 2).T
        rows, lengths = np.arange(self._num_rows), self._lengths[Axis.TOKENS]
        is_bad = (owners > rows) | (shared > lengths) | ((owners == rows) != (shared == 0))
        if not is_bad.any():
            is_bad = (shared > lengths[owners]) | (shared[owners] > 0)
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise stored.refuse(
                f"sequence {row} says that its first {shared[row]} tokens are those of sequence {owners[row]}"
            )
        return Prefixes(owners, shared)

    def _read_mask(self, stored: StoredSection) -> MaskRows:
        lengths = self._lengths[Axis.TOKENS]
        if stored.section.form is Form.BITS:
            return self._read_bits(stored, lengths)
        num_spans, spans = self._read_pairs(stored, SPAN)
        starts, stops = spans[:, 0].astype(np.int64), spans.sum(axis=1, dtype=np.int64)
        owners = np.repeat(np.arange(self._num_rows), num_spans)
        is_bad = (spans[:, 1] < 1) | (stops > lengths[owners])
        is_bad[1:] |= (starts[1:] <= stops[:-1]) & (owners[1:] == owners[:-1])
        if is_bad.any():
            span = int(np.flatnonzero(is_bad)[0])
            raise stored.refuse(
                f"sequence {owners[span]} has a span of {spans[span, 1]} at {spans[span, 0]}; spans are in "
                "order, apart and inside"
            )
        return SpanRows(spans, num_spans, lengths)

    def _read_bits(self, stored: StoredSection, lengths: Integers) -> BitRows:
        num_bytes = (lengths + 7) // 8
        stored.expect(int(num_bytes.sum()))
        rows = BitRows(stored.content(), lengths)
        unused = np.where(lengths % 8 == 0, 0, 255 << (lengths % 8)).astype(np.uint8)
        if (rows.bits[np.cumsum(num_bytes) - 1] & unused).any():
            raise stored.refuse("bits behind the end of a sequence are set")
        return rows

    def _read_pairs(self, stored: StoredSection, dtype: np.dtype[Any]) -> tuple[Integers, NDArray[Any]]:
        counts, pairs = self._split(stored)
        stored.expect(4 * self._num_rows + PAIR_BYTES * int(counts.sum()))
        return counts, pairs.view(dtype).reshape(-1, 2)

    def _split(self, stored: StoredSection) -> tuple[Integers, NDArray[np.uint8]]:
        """Returns one uint32 per sequence, which the section begins with, and the bytes behind them."""
        size = 4 * self._num_rows
        if stored.section.num_bytes < size:
            raise stored.refuse(f"{stored.section.num_bytes} bytes; a number per sequence takes {size}")
        content = stored.content()
        return content[:size].view("<u4").astype(np.int64), content[size:]

    def _read_column(self, column: Column, stored: StoredSection, prefixes: Prefixes | None) -> Rows:
        lengths, form = self._lengths[column.stored], stored.section.form
        if form is Form.RUNS:
            return self._read_runs(stored, lengths)
        if form is Form.CODES:
            return self._read_codes(stored, column)
        if form is Form.VALUES:
            values = self._read_values(stored, int(lengths.sum()))
            return CellRows(values) if column.stored is Axis.SEQUENCES else FlatRows(values, lengths)
        if prefixes is None:
            raise stored.refuse(f"needs the section {SHARED}")
        tails = self._read_values(stored, int((lengths - prefixes.lengths).sum()))
        return FlatRows(tails, lengths, prefixes)

    def _read_values(self, stored: StoredSection, size: int) -> NDArray[Any]:
        section = stored.section
        dtype = np.dtype(section.dtype)
        for dim in section.dims:
            size *= dim
        stored.expect(size * dtype.itemsize)
        values = stored.content().view(dtype).reshape(-1, *section.dims)
        limit = self._limits.vocab_size
        if section.name == "token_ids" and limit is not None and values.size and values.max() >= limit:
            raise stored.refuse(f"holds {values.max()}; the vocabulary has {limit} tokens")
        return values

    def _read_runs(self, stored: StoredSection, lengths: Integers) -> RunRows:
        dtype: np.dtype[Any] = np.dtype(stored.section.dtype)
        num_runs, runs = self._read_pairs(stored, RUN)
        limits = np.iinfo(dtype)
        if runs.size and not limits.min <= runs[:, 0].min() <= runs[:, 0].max() <= limits.max:
            raise stored.refuse(f"holds a value that does not fit {dtype}")
        if (runs[:, 1] < 1).any():
            raise stored.refuse("a run has no values")
        sums = sum_rows(runs[:, 1], offsets_of(num_runs))
        if (sums != lengths).any():
            row = int(np.flatnonzero(sums != lengths)[0])
            raise stored.refuse(f"runs of sequence {row} hold {sums[row]} values; expected {lengths[row]}")
        return RunRows(runs, num_runs, lengths, dtype)

    def _read_codes(self, stored: StoredSection, column: Column) -> CellRows:
        codes, packed = self._split(stored)
        if _array_length(packed[:5].tobytes()) > self._num_rows:
            raise stored.refuse("has more distinct values than there are sequences")
        try:
            if column.dtype is RoleSpans:
                self._count_spans(stored, codes, msgspec.msgpack.decode(packed.data, type=list[msgspec.Raw]))
            distinct = msgspec.msgpack.decode(packed.data, type=list[column.dtype])  # type: ignore[name-defined]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise stored.refuse(f"is not what it should be: {error}") from error
        if codes.max() >= len(distinct):
            raise stored.refuse(f"code {codes.max()}, but there are {len(distinct)} distinct values")
        if column.dtype is str:
            self._measure_text(stored, codes, distinct, packed.size)
        values = np.empty(len(distinct), object)
        values[:] = distinct
        return CellRows(values, codes)

    def _count_spans(self, stored: StoredSection, codes: Integers, distinct: list[msgspec.Raw]) -> None:
        """Refuses too many role spans before they become Python objects; sequences may share stored ones."""
        counts = np.array([_array_length(bytes(memoryview(each)[:5])) for each in distinct], np.int64)
        allowed = max(self._limits.max_bytes // _OBJECT_BYTES, self._num_rows)
        if codes.max() < len(counts) and (total := int(counts[codes].sum())) > allowed:
            raise stored.refuse(f"{total} spans; at most {allowed} are taken")

    def _measure_text(
        self, stored: StoredSection, codes: Integers, distinct: list[str], num_bytes: int
    ) -> None:
        """Refuses texts that are too long, alone or summed over the sequences that share them.

        Lengths are only summed where the bytes of the section could exceed a limit.
        """
        limits = self._limits
        if num_bytes > limits.max_text_bytes and (longest := max(map(len, distinct))) > limits.max_text_bytes:
            raise stored.refuse(f"a text of {longest}; at most {limits.max_text_bytes} are taken")
        if num_bytes * self._num_rows > limits.max_bytes:
            total = int(np.fromiter(map(len, distinct), np.int64, len(distinct))[codes].sum())
            if total > limits.max_bytes:
                raise stored.refuse(f"{limits.too_large(total)} as the text of all sequences")


def _array_length(head: bytes) -> int:
    """Returns the length that a msgpack array declares; 0 for anything else, which msgspec refuses later."""
    if head and 0x90 <= head[0] <= 0x9F:
        return head[0] & 15
    size = {0xDC: 2, 0xDD: 4}.get(head[0] if head else 0, 0)
    return int.from_bytes(head[1 : 1 + size], "big")
