"""Bytes -> batch. Columns are views of the payload; nothing that it claims is believed before it is checked.

Checked in this order: magic, version, length and checksum; the directory, section by section, against the
bytes that are there and against the limits; lengths and counts; every column against those; the rules of
samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.data import COLUMNS, Axis, Column, TokenTable
from pellucid.data.packed import PAIR_BYTES, RUN, SPAN
from pellucid.data.rows import (
    BitRows,
    CellRows,
    FlatRows,
    Integers,
    MaskRows,
    Prefixes,
    Rows,
    RunRows,
    SpanRows,
    offsets_of,
    sum_rows,
)
from pellucid.data.rules import check_experts, check_rules, check_text
from pellucid.data.schema import Encoding, RoleSpans
from pellucid.errors import ColumnError
from pellucid.transport.wire import (
    COUNTS,
    DTYPES,
    ENTRY,
    HEADER_BYTES,
    LENGTHS,
    MAGIC,
    NO_DTYPE,
    PREAMBLE,
    SHARED,
    VERSION,
    Batch,
    Form,
    Limits,
    Refusal,
    Squeeze,
    aligned,
    checksum,
    count_planes,
    inflate,
    too_large,
)

_SPECIAL = {LENGTHS: (0, 0), SHARED: (2, 0)}
_FORMS, _SQUEEZES = frozenset(Form), frozenset(Squeeze)
_OBJECT_BYTES = 256
"""Upper bound on the memory of one role span."""

_DECLARED = {
    Encoding.RAW: {Form.VALUES},
    Encoding.SPANS: {Form.SPANS, Form.BITS},
    Encoding.RUNS: {Form.RUNS, Form.VALUES},
}


def decode_batch(payload: bytes | memoryview, *, sender: str, limits: Limits | None = None) -> Batch:
    """Decodes a payload; the error for a bad one names `sender`."""
    try:
        return _decode(memoryview(payload).cast("B"), limits or Limits())
    except Refusal as refusal:
        raise refusal.by(sender) from None


def _decode(payload: memoryview, limits: Limits) -> Batch:
    header = _read_header(payload, limits)
    sections = _read_directory(payload, header, limits)
    columns = _Columns(header, sections, limits).read()
    try:
        check_rules(columns)
        if limits.text_only:
            check_text(columns)
        if limits.experts is not None:
            check_experts(columns, limits.experts)
        _check_run(columns, header.run_id)
    except ColumnError as error:
        position = sections[error.column].offset if error.column in sections else header.end
        raise Refusal(position, str(error)) from error
    lengths = columns["token_ids"].lengths
    return Batch(header.run_id, header.step, TokenTable.of_rows(lengths, columns))


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


@dataclass(frozen=True, slots=True)
class _Header:
    step: int
    num_tokens: int
    num_sampled: int
    num_trainable: int
    num_sequences: int
    num_sections: int
    run_id: str
    end: int
    """Where the directory starts."""


def _read_header(payload: memoryview, limits: Limits) -> _Header:
    if len(payload) > limits.max_bytes:
        raise Refusal(0, too_large(len(payload), limits.max_bytes))
    if len(payload) < HEADER_BYTES:
        raise Refusal(len(payload), f"ends here; the header alone has {HEADER_BYTES} bytes")
    magic, version, zero, expected = PREAMBLE.unpack_from(payload)
    if magic != MAGIC:
        raise Refusal(0, f"starts with {magic!r}; expected {MAGIC!r}")
    if version != VERSION or zero:
        raise Refusal(4, f"format version {version}; this pellucid reads {VERSION}")
    num_bytes, step, tokens, sampled, trainable, sequences, sections, run_bytes = COUNTS.unpack_from(
        payload, PREAMBLE.size
    )
    if num_bytes != len(payload):
        raise Refusal(PREAMBLE.size, f"says it has {num_bytes} bytes, but {len(payload)} arrived")
    if (found := checksum(payload[PREAMBLE.size :])) != expected:
        raise Refusal(8, f"checksum {expected:016x}, but the content gives {found:016x}")
    if step < 0:
        raise Refusal(24, f"step {step}; it has to be 0 or more")
    if tokens > limits.max_tokens:
        raise Refusal(32, f"{tokens} tokens; at most {limits.max_tokens} are taken")
    if not 1 <= sequences <= limits.max_sequences:
        raise Refusal(56, f"{sequences} sequences; 1 to {limits.max_sequences} are taken")
    end = aligned(HEADER_BYTES + run_bytes)
    if end > len(payload):
        raise Refusal(62, f"a run id of {run_bytes} bytes reaches beyond the end")
    run_id = _text(payload[HEADER_BYTES : HEADER_BYTES + run_bytes], HEADER_BYTES)
    _expect_zeros(payload, HEADER_BYTES + run_bytes, end)
    return _Header(step, tokens, sampled, trainable, sequences, sections, run_id, end)


@dataclass(frozen=True, slots=True)
class _DecodedSection:
    name: str
    form: Form
    dtype: np.dtype[Any] | None
    dims: tuple[int, ...]
    offset: int
    stored: memoryview
    num_bytes: int
    """Inflated."""

    is_squeezed: bool

    def content(self) -> NDArray[np.uint8]:
        if self.is_squeezed:
            return inflate(self.stored, self.num_bytes, count_planes(self.form, self.dtype), self.offset)
        return np.frombuffer(self.stored, np.uint8)

    def refuse(self, reason: str) -> Refusal:
        return Refusal(self.offset, f"{self.name}: {reason}")

    def expect(self, num_bytes: int) -> None:
        if self.num_bytes != num_bytes:
            raise self.refuse(f"{self.num_bytes} bytes; expected {num_bytes}")


def _read_directory(payload: memoryview, header: _Header, limits: Limits) -> dict[str, _DecodedSection]:
    position = header.end + ENTRY.size * header.num_sections
    if position > len(payload):
        raise Refusal(60, f"a directory of {header.num_sections} sections reaches beyond the end")
    sections: dict[str, _DecodedSection] = {}
    inflated = 0
    for number in range(header.num_sections):
        at = header.end + ENTRY.size * number
        section = _read_entry(payload, at, position)
        if section.name in sections:
            raise Refusal(at, f"section {section.name} is there twice")
        sections[section.name] = section
        end = position + len(section.stored)
        position = aligned(end)
        _expect_zeros(payload, end, position)
        inflated += section.num_bytes
        if inflated > limits.max_bytes:
            raise Refusal(at, f"inflates to {too_large(inflated, limits.max_bytes)}")
    if position != len(payload):
        raise Refusal(
            min(position, len(payload)),
            f"the last section ends at {position}, but {len(payload)} bytes arrived",
        )
    missing = [LENGTHS, *(name for name, column in COLUMNS.items() if column.required)]
    for name in missing:
        if name not in sections:
            raise Refusal(header.end, f"lacks the section {name}")
    return sections


def _read_entry(payload: memoryview, at: int, position: int) -> _DecodedSection:
    raw_name, form, dtype, squeezed, zero, *dims, last_zero, offset, stored, num_bytes = ENTRY.unpack_from(
        payload, at
    )
    name = _text(raw_name.rstrip(b"\0"), at)
    if zero or last_zero:
        raise Refusal(at, f"section {name}: reserved bytes are not zero")
    if name not in COLUMNS and name not in _SPECIAL:
        raise Refusal(at, f"section {name!r} is not known")
    if form not in _FORMS:
        raise Refusal(at + 24, f"section {name}: form {form} is not known")
    if dtype != NO_DTYPE and dtype not in DTYPES:
        raise Refusal(at + 25, f"section {name}: dtype {dtype} is not known")
    if squeezed not in _SQUEEZES:
        raise Refusal(at + 26, f"section {name}: compression {squeezed} is not known")
    if offset != position or stored > len(payload) - position:
        raise Refusal(
            at + 40, f"section {name}: {stored} bytes at {offset}; it has to start at {position} and fit"
        )
    if squeezed == Squeeze.NONE and stored != num_bytes:
        raise Refusal(at + 56, f"section {name}: {stored} bytes cannot inflate to {num_bytes}")
    section = _DecodedSection(
        name,
        Form(form),
        DTYPES.get(dtype),
        tuple(dims),
        position,
        payload[position : position + stored],
        num_bytes,
        squeezed == Squeeze.ZSTD,
    )
    _check_declaration(section, at)
    return section


def _check_declaration(section: _DecodedSection, at: int) -> None:
    """Form, dtype and dimensions against what the column declares."""
    forms, dtypes, num_dims = declared(section.name)
    is_right = all(section.dims[:num_dims]) and not any(section.dims[num_dims:])
    if section.name in _SPECIAL:
        is_right = section.dims == _SPECIAL[section.name]
    if section.form not in forms:
        raise Refusal(at + 24, f"section {section.name}: form {section.form.name} does not go with it")
    if section.dtype not in dtypes:
        raise Refusal(at + 25, f"section {section.name}: dtype {section.dtype} does not go with it")
    if not is_right:
        raise Refusal(at + 28, f"section {section.name}: dimensions {section.dims} do not go with it")


def declared(name: str) -> tuple[set[Form], set[np.dtype[Any] | None], int]:
    """Returns the forms and dtypes that a section may have, and how many dimensions an entry has."""
    if name in _SPECIAL:
        return {Form.VALUES}, {np.dtype("<u4")}, 0
    column = COLUMNS[name]
    if not column.is_number:
        return {Form.BLOBS if column.dtype is bytes else Form.TEXT}, {None}, 0
    if column.encoding is Encoding.SPANS:
        return _DECLARED[column.encoding], {None}, 0
    forms = _DECLARED[column.encoding] | ({Form.TAILS} if column.shares_prompts else set())
    dtypes: set[np.dtype[Any] | None] = {
        np.dtype(kind) for kind in (column.dtype, column.narrow) if kind is not None
    }
    return forms, dtypes, len(column.dims)


class _Columns:
    """Sections as rows, once lengths and masks are known to be consistent."""

    def __init__(self, header: _Header, sections: Mapping[str, _DecodedSection], limits: Limits) -> None:
        self._header = header
        self._sections = sections
        self._limits = limits
        self._num_rows = header.num_sequences
        self._lengths: dict[Axis, Integers] = {Axis.SEQUENCES: np.ones(self._num_rows, np.int64)}

    def read(self) -> dict[str, Rows]:
        self._lengths[Axis.TOKENS] = self._read_lengths()
        prefixes = self._read_shared() if SHARED in self._sections else None
        masks = {name: self._read_mask(name) for name in ("sampled", "loss_mask")}
        self._check_masks(masks)
        self._lengths[Axis.SAMPLED] = masks["sampled"].counts
        return {
            name: masks.get(name) or self._read_column(column, self._sections[name], prefixes)
            for name, column in COLUMNS.items()
            if name in self._sections
        }

    def _read_lengths(self) -> Integers:
        section = self._sections[LENGTHS]
        section.expect(4 * self._num_rows)
        lengths = section.content().view("<u4").astype(np.int64)
        if (lengths < 1).any():
            raise section.refuse(f"sequence {np.flatnonzero(lengths < 1)[0]} has no tokens")
        if (total := int(lengths.sum())) != self._header.num_tokens:
            raise section.refuse(f"{total} tokens; the header says {self._header.num_tokens}")
        return lengths

    def _read_shared(self) -> Prefixes:
        section = self._sections[SHARED]
        section.expect(8 * self._num_rows)
        owners, shared = section.content().view("<u4").astype(np.int64).reshape(-1, 2).T
        rows, lengths = np.arange(self._num_rows), self._lengths[Axis.TOKENS]
        is_bad = (owners > rows) | (shared > lengths) | ((owners == rows) & (shared > 0))
        is_bad |= (owners != rows) & (shared == 0)
        if not is_bad.any():
            is_bad = (shared > lengths[owners]) | (shared[owners] > 0)
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise section.refuse(
                f"sequence {row} says that its first {shared[row]} tokens are those of sequence {owners[row]}"
            )
        return Prefixes(owners, shared)

    def _read_mask(self, name: str) -> MaskRows:
        section, lengths = self._sections[name], self._lengths[Axis.TOKENS]
        if section.form is Form.BITS:
            return self._read_bits(section, lengths)
        num_spans, pairs = self._read_pairs(section)
        spans = pairs.view(SPAN).reshape(-1, 2)
        starts, stops = spans[:, 0].astype(np.int64), spans.sum(axis=1, dtype=np.int64)
        owners = np.repeat(np.arange(self._num_rows), num_spans)
        is_bad = (spans[:, 1] < 1) | (stops > lengths[owners])
        is_bad[1:] |= (starts[1:] <= stops[:-1]) & (owners[1:] == owners[:-1])
        if is_bad.any():
            span = int(np.flatnonzero(is_bad)[0])
            raise section.refuse(
                f"sequence {owners[span]} has a span of {spans[span, 1]} at {spans[span, 0]}; spans are in "
                "order, apart and inside"
            )
        return SpanRows(spans, num_spans, lengths)

    def _read_bits(self, section: _DecodedSection, lengths: Integers) -> BitRows:
        num_bytes = (lengths + 7) // 8
        section.expect(int(num_bytes.sum()))
        rows = BitRows(section.content(), lengths)
        unused = np.where(lengths % 8 == 0, 0, 255 << (lengths % 8)).astype(np.uint8)
        if (rows.bits[np.cumsum(num_bytes) - 1] & unused).any():
            raise section.refuse("bits behind the end of a sequence are set")
        return rows

    def _read_pairs(self, section: _DecodedSection) -> tuple[Integers, NDArray[np.uint8]]:
        counts, pairs = self._split(section, "counts")
        section.expect(4 * self._num_rows + PAIR_BYTES * int(counts.sum()))
        return counts, pairs

    def _split(self, section: _DecodedSection, what: str) -> tuple[Integers, NDArray[np.uint8]]:
        """Returns one uint32 per sequence, which the section begins with, and the bytes behind them."""
        size = 4 * self._num_rows
        if section.num_bytes < size:
            raise section.refuse(f"{section.num_bytes} bytes; the {what} alone have {size}")
        content = section.content()
        return content[:size].view("<u4").astype(np.int64), content[size:]

    def _check_masks(self, masks: Mapping[str, MaskRows]) -> None:
        declared = {"sampled": self._header.num_sampled, "loss_mask": self._header.num_trainable}
        for name, mask in masks.items():
            if (total := int(mask.counts.sum())) != declared[name]:
                raise self._sections[name].refuse(f"{total} tokens; the header says {declared[name]}")
        if type(masks["sampled"]) is not type(masks["loss_mask"]):
            raise self._sections["loss_mask"].refuse("has another form than sampled")

    def _read_column(self, column: Column, section: _DecodedSection, prefixes: Prefixes | None) -> Rows:
        lengths = self._lengths[column.stored]
        match section.form:
            case Form.RUNS:
                return self._read_runs(section, lengths)
            case Form.TEXT:
                return self._read_text(section, column)
            case Form.BLOBS:
                return self._read_blobs(section)
            case Form.TAILS if prefixes is None:
                raise section.refuse(f"needs the section {SHARED}")
        shared = prefixes if section.form is Form.TAILS else None
        values = self._read_values(section, column, lengths if shared is None else lengths - shared.lengths)
        return CellRows(values) if column.stored is Axis.SEQUENCES else FlatRows(values, lengths, shared)

    def _read_values(self, section: _DecodedSection, column: Column, lengths: Integers) -> NDArray[Any]:
        assert section.dtype is not None
        dims = section.dims[: len(column.dims)]
        num_bytes = section.dtype.itemsize * int(lengths.sum())
        for dim in dims:
            num_bytes *= dim
        section.expect(num_bytes)
        values = section.content().view(section.dtype).reshape(-1, *dims)
        limit = self._limits.vocab_size
        if section.name == "token_ids" and limit is not None and values.size and values.max() >= limit:
            raise section.refuse(f"holds {values.max()}; the vocabulary has {limit} tokens")
        return values

    def _read_runs(self, section: _DecodedSection, lengths: Integers) -> RunRows:
        assert section.dtype is not None
        num_runs, pairs = self._read_pairs(section)
        runs = pairs.view(RUN).reshape(-1, 2)
        limits = np.iinfo(section.dtype)
        if runs.size and not limits.min <= runs[:, 0].min() <= runs[:, 0].max() <= limits.max:
            raise section.refuse(f"holds a value that does not fit {section.dtype}")
        if (runs[:, 1] < 1).any():
            raise section.refuse("a run has no values")
        sums = sum_rows(runs[:, 1], offsets_of(num_runs))
        if (sums != lengths).any():
            row = int(np.flatnonzero(sums != lengths)[0])
            raise section.refuse(f"runs of sequence {row} hold {sums[row]} values; expected {lengths[row]}")
        return RunRows(runs, num_runs, lengths, section.dtype)

    def _read_text(self, section: _DecodedSection, column: Column) -> CellRows:
        codes, packed = self._split(section, "codes")
        if _array_length(packed[:5].tobytes()) > self._num_rows:
            raise section.refuse("has more distinct values than there are sequences")
        try:
            if column.dtype is RoleSpans:
                self._count_spans(section, codes, msgspec.msgpack.decode(packed.data, type=list[msgspec.Raw]))
            distinct = msgspec.msgpack.decode(packed.data, type=list[column.dtype])  # type: ignore[name-defined]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise section.refuse(f"is not what it should be: {error}") from error
        rows = self._chosen(section, codes, distinct)
        if column.dtype is str:
            self._measure_text(section, codes, distinct, packed.size)
        return rows

    def _count_spans(self, section: _DecodedSection, codes: Integers, distinct: list[msgspec.Raw]) -> None:
        """Refuses too many role spans before they become Python objects; sequences may share stored ones."""
        counts = np.array([_array_length(bytes(memoryview(each)[:5])) for each in distinct], np.int64)
        allowed = max(self._limits.max_bytes // _OBJECT_BYTES, self._num_rows)
        if codes.max() < len(counts) and (total := int(counts[codes].sum())) > allowed:
            raise section.refuse(f"{total} spans; at most {allowed} are taken")

    def _measure_text(
        self, section: _DecodedSection, codes: Integers, distinct: list[str], num_bytes: int
    ) -> None:
        """Refuses texts that are too long, alone or summed over the sequences that share them.

        Lengths are only summed where the bytes of the section could exceed a limit.
        """
        limits = self._limits
        if num_bytes > limits.max_text_bytes and (longest := max(map(len, distinct))) > limits.max_text_bytes:
            raise section.refuse(f"a text of {longest}; at most {limits.max_text_bytes} are taken")
        if num_bytes * self._num_rows > limits.max_bytes:
            total = int(np.fromiter(map(len, distinct), np.int64, len(distinct))[codes].sum())
            if total > limits.max_bytes:
                raise section.refuse(f"{too_large(total, limits.max_bytes)} as the text of all sequences")

    def _read_blobs(self, section: _DecodedSection) -> CellRows:
        codes, rest = self._split(section, "codes")
        if rest.size < 4 or rest.size < 4 + 8 * (count := int(rest[:4].view("<u4")[0])):
            raise section.refuse("ends before the sizes of its values")
        sizes = rest[4 : 4 + 8 * count].view("<u8").tolist()
        heap = rest[4 + 8 * count :]
        if count > self._num_rows or sum(sizes) != heap.size:
            raise section.refuse(f"{count} values of {sum(sizes)} bytes in {heap.size} bytes")
        bounds = np.cumsum([0, *sizes]).tolist()
        distinct = [heap[start:stop].tobytes() for start, stop in pairwise(bounds)]
        return self._chosen(section, codes, distinct)

    def _chosen(self, section: _DecodedSection, codes: Integers, distinct: list[Any]) -> CellRows:
        if codes.max() >= len(distinct):
            raise section.refuse(f"code {codes.max()}, but there are {len(distinct)} distinct values")
        values = np.empty(len(distinct), object)
        values[:] = distinct
        return CellRows(values, codes)


def _array_length(head: bytes) -> int:
    """Returns the length that a msgpack array declares; 0 for anything else, which msgspec refuses later."""
    if head and 0x90 <= head[0] <= 0x9F:
        return head[0] & 15
    if head[:1] == b"\xdc":
        return int.from_bytes(head[1:3], "big")
    if head[:1] == b"\xdd":
        return int.from_bytes(head[1:5], "big")
    return 0


def _text(data: memoryview | bytes, position: int) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(position, f"not UTF-8: {error.reason}") from error


def _expect_zeros(payload: memoryview, start: int, stop: int) -> None:
    if any(payload[start:stop]):
        raise Refusal(start, "the bytes that fill up to the next section are not zero")
