"""A step as the browser takes it: an index, measures, and chunks with the tokens.

step      what the records say of themselves, points, histograms, where each chunk begins
rows      what their tokens add up to, one row per record
chunk k   the columns of a few short records, or of one long one: inflated when a record of it is opened
lead r    the first tokens of a long record: what is in sight first does not wait for all of them
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data import TokenTable
from pellucid.data.schema import TOKEN_FIELDS
from pellucid.errors import DataError
from pellucid.export.reader import RATIOS
from pellucid.viewer.access import Exports, Records, StepSummary, has_masks
from pellucid.viewer.blob import BlobWriter
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.rows import Identity, Measures
from pellucid.viewer.summary import histograms, summarise

CHUNK_TOKENS = 8192
LEAD_TOKENS = 4096
LONG_TOKENS = 4 * LEAD_TOKENS
"""Records of more have a lead."""

_ABSOLUTE, _RELATIVE = 1e-6, 1e-5
"""A record in float32 differs from its formula by rounding: a KL near 0 by 1e-7 if taken as r − ℓ − 1."""

_SHOWN = tuple(field.name for field in TOKEN_FIELDS)


@dataclass(frozen=True)
class EncodedStep:
    index: bytes
    rows: bytes
    chunks: list[bytes]
    leads: dict[int, bytes]
    """Leads by record."""

    summary: dict[str, Any]
    token_ids: NDArray[np.int64]
    """Distinct token ids of the step."""


def encode_step(
    step: int, exports: Exports, records: Records, roles: RoleFinder, *, level: int | None = 6
) -> EncodedStep:
    """Encodes a step in one pass over its records."""
    if not records:
        raise DataError(f"step {step} holds no records")
    identity, measures, chunks, starts, leads = Identity(), Measures(), [], [], {}
    seen: NDArray[np.int64] = np.empty(0, np.int64)
    is_whole = len(records) == len(exports.records(step))
    written = exports.known_summary(step) if is_whole else None
    summary = written or StepSummary()
    masks_known = False
    for batch in exports.batches(records):
        masks_known = masks_known or has_masks(batch)
        for first, last in chunk_spans(batch.lengths):
            starts.append(len(identity) + first)
            chunk = batch.select(np.arange(first, last))
            chunks.append(encode_chunk(chunk, roles, level=level))
            if chunk.num_tokens > LONG_TOKENS:
                leads[starts[-1]] = encode_lead(chunk, roles, level=level)
        identity.add(batch)
        measures.add(batch)
        if written is None:
            summary.add(batch)
        seen = np.union1d(seen, batch["token_ids"])
    if written is None and is_whole:
        exports.keep_summary(step, summary)
    index, point = encode_index(step, identity, summary, starts, masks_known=masks_known, level=level)
    return EncodedStep(index, measures.encode(level=level), chunks, leads, point, seen)


def encode_index(
    step: int,
    identity: Identity,
    summary: StepSummary,
    starts: Sequence[int],
    *,
    masks_known: bool,
    level: int | None,
) -> tuple[bytes, dict[str, Any]]:
    """Returns the index, and the step's points."""
    blob = BlobWriter()
    words = identity.write(blob)
    blob.add("chunk_starts", np.array(starts, np.int32))
    point = summarise(step, summary, has_masks=masks_known)
    long = np.flatnonzero(np.concatenate(identity.numbers["tokens"]) > LONG_TOKENS)
    meta = {
        "records": len(identity),
        "leads": long,
        "words": words,
        "histograms": histograms(summary),
        **point,
    }
    return blob.finish(meta, level=level), point


def chunk_spans(lengths: NDArray[np.int64], max_tokens: int = CHUNK_TOKENS) -> Iterator[tuple[int, int]]:
    """[first, last) records of each chunk: as many as fit, at least one."""
    first = num_tokens = 0
    for index, length in enumerate(lengths.tolist()):
        if index > first and num_tokens + length > max_tokens:
            yield first, index
            first, num_tokens = index, 0
        num_tokens += length
    if len(lengths):
        yield first, len(lengths)


def encode_chunk(batch: TokenTable, roles: RoleFinder, *, level: int | None) -> bytes:
    blob = BlobWriter()
    lengths = batch.lengths
    blob.add("lengths", lengths)
    present = {name: _as_numbers(batch[name]) for name in _SHOWN if name in batch}
    derived = []
    for name, values in present.items():
        if name in RATIOS and _follows(name, values, present):
            derived.append(name)
        elif name == "position_ids" and np.array_equal(values, _ramp(lengths)):
            blob.add_ramp(name)
        elif name == "trainer_logprobs" and "inference_logprobs" in present:
            blob.add_near(name, values, "inference_logprobs", present["inference_logprobs"])
        elif (per_record := _per_record(values, lengths)) is not None:
            blob.add(name, per_record, per="record")
        else:
            blob.add(name, values)
    return blob.finish({"derived": derived, "segments": roles.segments(batch)}, level=level)


def encode_lead(batch: TokenTable, roles: RoleFinder, *, level: int | None) -> bytes:
    """Returns the first tokens of one record, in the form of a chunk."""
    columns = {
        name: batch[name][:LEAD_TOKENS] if batch.is_per_token(name) else batch[name] for name in batch.columns
    }
    return encode_chunk(TokenTable(np.array([LEAD_TOKENS]), columns), roles, level=level)


def _as_numbers(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def _ramp(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(int(lengths.sum())) - starts


def _per_record(values: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[Any] | None:
    """Returns one value per record where a column is constant in each of several."""
    if len(lengths) < 2 or not lengths.all():
        return None
    first = values[np.cumsum(lengths) - lengths]
    repeated = np.repeat(first, lengths)
    same = np.array_equal(repeated, values, equal_nan=values.dtype.kind == "f")
    return first if same else None


def _follows(name: str, recorded: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> bool:
    """Whether every value is the formula's, null where the formula is.

    A page carries such a column only where it says something else: the browser computes it from the
    logprobs, which are carried exactly.
    """
    trainer, inference = columns.get("trainer_logprobs"), columns.get("inference_logprobs")
    if trainer is None or inference is None:
        return False
    with np.errstate(all="ignore"):
        expected = RATIOS[name](trainer.astype(np.float64), inference.astype(np.float64))
    known = np.isfinite(recorded)
    if not np.array_equal(known, np.isfinite(expected)):
        return False
    error = np.abs(recorded[known] - expected[known])
    return bool((error <= _ABSOLUTE + _RELATIVE * np.abs(expected[known])).all())
