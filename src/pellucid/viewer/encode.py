"""A step as the browser takes it: an index with one row per record, and chunks with their tokens.

    step      rows, summary, histograms, where each chunk begins       one blob
    chunk k   the columns of a few short records, or of one long one   inflated when a record of it is opened
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.viewer.access import Record
from pellucid.viewer.blob import BlobWriter
from pellucid.viewer.derive import FORMULAS, follows
from pellucid.viewer.roles import RoleFinder, Segment
from pellucid.viewer.rows import Rows
from pellucid.viewer.summary import StepSummary

CHUNK_TOKENS = 8192

SHOWN = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "sampled",
    "advantages",
    "rewards",
    "temperatures",
    "inference_logprobs",
    "trainer_logprobs",
    "teacher_logprobs",
    "entropy",
    "mismatch_kl",
    "log_importance_ratio",
    "importance_ratio",
    "prob_delta",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "token_loss",
    "policy_versions",
)


@dataclass(frozen=True)
class EncodedStep:
    index: bytes
    chunks: list[bytes]
    summary: dict[str, Any]
    token_ids: NDArray[np.int64]
    """The distinct ones."""


def encode_step(step: int, records: Iterable[Record], roles: RoleFinder, *, level: int = 6) -> EncodedStep:
    rows, summary, chunks, starts = Rows(), StepSummary(), [], []
    seen: NDArray[np.int64] = np.empty(0, np.int64)
    for chunk in _in_chunks(records):
        starts.append(len(rows))
        for record in chunk:
            rows.add(record)
            summary.add(record)
        chunks.append(encode_chunk(chunk, [roles.segments(record) for record in chunk], level=level))
        seen = np.union1d(seen, np.concatenate([record.columns["token_ids"] for record in chunk]))
    blob = BlobWriter()
    words = rows.write(blob)
    blob.add("chunk_starts", np.array(starts, np.int32))
    point = summary.finish(step, rows)
    meta = {"step": step, "records": len(rows), "words": words, "histograms": summary.histograms(), **point}
    return EncodedStep(blob.finish(meta, level=level), chunks, point, seen)


def encode_chunk(records: Sequence[Record], segments: Sequence[list[Segment]], *, level: int) -> bytes:
    blob = BlobWriter()
    lengths = np.array([record.num_tokens for record in records], np.int32)
    blob.add("lengths", lengths)
    columns = {name: _concatenate(records, name) for name in SHOWN}
    present = {name: values for name, values in columns.items() if values is not None}
    derived = []
    for name, values in present.items():
        if name in FORMULAS and follows(name, values, present):
            derived.append(name)
        elif name == "position_ids" and np.array_equal(values, _ramp(lengths)):
            blob.add_ramp(name)
        elif name == "trainer_logprobs" and "inference_logprobs" in present:
            blob.add_near(name, values, "inference_logprobs", present["inference_logprobs"])
        elif (per_record := _per_record(values, lengths)) is not None:
            blob.add(name, per_record, per="record")
        else:
            blob.add(name, values)
    return blob.finish({"derived": derived, "segments": segments}, level=level)


def _in_chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    num_tokens = 0
    for record in records:
        if chunk and num_tokens + record.num_tokens > CHUNK_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(record)
        num_tokens += record.num_tokens
    if chunk:
        yield chunk


def _concatenate(records: Sequence[Record], name: str) -> NDArray[Any] | None:
    """NaN where one record lacks the column; None where all do."""
    if all(name not in record.columns for record in records):
        return None
    return np.concatenate(
        [record.columns.get(name, np.full(record.num_tokens, np.nan)) for record in records]
    )


def _ramp(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(int(lengths.sum())) - starts


def _per_record(values: NDArray[Any], lengths: NDArray[np.int32]) -> NDArray[Any] | None:
    """One value per record where a column is constant in each of several."""
    if len(lengths) < 2 or not lengths.all():
        return None
    first = values[np.cumsum(lengths) - lengths]
    repeated = np.repeat(first, lengths)
    same = np.array_equal(repeated, values, equal_nan=values.dtype.kind == "f")
    return first if same else None
