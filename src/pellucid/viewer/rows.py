"""One row per record of a step: what its table, its groups and its summaries are made of.

Means and maxima are over trainable tokens. None where the record does not say.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.viewer.access import ColumnBatch, trainable
from pellucid.viewer.blob import BlobWriter

SPARK_CELLS = 32
SPARK_DECADES = 6
"""A sparkline's cell holds the largest KL of its stretch, as 0 to 255 over 1e-6 … 1 on a log scale."""

NUMBERS = (
    "rank",
    "tokens",
    "trainable",
    "sampled",
    "reward",
    "advantage",
    "kl_mean",
    "kl_max",
    "entropy",
    "masked",
    "masked_high",
    "masked_low",
    "loss",
    "denominator",
    "version_low",
    "version_high",
    "staleness",
    "micro_step",
    "micro_sequence",
    "export_index",
)
WORDS = ("env", "mode", "example", "group", "rollout", "sample", "run", "stop")
_FIELDS = {
    "env": "env_name",
    "mode": "training_mode",
    "example": "example_id",
    "group": "group_id",
    "rollout": "rollout_id",
    "sample": "sample_id",
    "run": "run_id",
    "stop": "stop_reason",
    "rank": "rank",
    "denominator": "denominator",
    "micro_step": "micro_step",
    "micro_sequence": "micro_sequence_idx",
    "export_index": "export_sequence_idx",
}


@dataclass
class Rows:
    numbers: dict[str, list[NDArray[np.float64]]] = field(
        default_factory=lambda: {name: [] for name in NUMBERS}
    )
    words: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in WORDS})
    sparks: list[NDArray[np.uint8]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.words["env"])

    def add(self, batch: ColumnBatch) -> None:
        measured = _measure(batch)
        for name in NUMBERS:
            values = measured[name] if name in measured else _numbers(batch, _FIELDS[name])
            self.numbers[name].append(np.asarray(values, np.float64))
        for name in WORDS:
            words = batch.columns.get(_FIELDS[name])
            self.words[name] += [""] * batch.num_sequences if words is None else map(_word, words)
        self.sparks.append(_sparks(batch))

    def write(self, blob: BlobWriter) -> dict[str, list[str]]:
        """The columns; words as codes. Returns the words by code."""
        codes = {}
        for name in NUMBERS:
            blob.add(name, self.number(name))
        for name, words in self.words.items():
            distinct = list(dict.fromkeys(words))
            code_of = {word: code for code, word in enumerate(distinct)}
            blob.add(name, np.array([code_of[word] for word in words], np.int32))
            codes[name] = distinct
        blob.add("sparks", np.concatenate(self.sparks) if self.sparks else np.zeros(0, np.uint8))
        return codes

    def number(self, name: str) -> NDArray[np.float64]:
        return np.concatenate(self.numbers[name]) if self.numbers[name] else np.empty(0)


def _measure(batch: ColumnBatch) -> dict[str, NDArray[Any]]:
    columns, chosen = batch.columns, trainable(batch)
    nothing = np.full(batch.num_sequences, np.nan)
    versions = columns.get("policy_versions", np.full(batch.num_tokens, np.nan))
    seen = np.isfinite(versions) & (versions >= 0)
    step = _numbers(batch, "step")
    found = {
        "tokens": batch.lengths,
        "trainable": _sum(batch, chosen) if "loss_mask" in columns else nothing,
        "sampled": _sum(batch, columns["sampled"] == 1) if "sampled" in columns else nothing,
        "kl_mean": _mean(batch, "mismatch_kl", chosen),
        "kl_max": _largest(batch, "mismatch_kl", chosen),
        "entropy": _mean(batch, "entropy", chosen),
        "loss": _sum(batch, np.nan_to_num(columns["token_loss"].astype(np.float64)))
        if "token_loss" in columns
        else nothing,
        "version_low": -_largest(batch, -versions, seen),
        "version_high": _largest(batch, versions, seen),
        "staleness": step - _mean(batch, versions, seen),
    }
    for row, column in (
        ("masked", "is_masked"),
        ("masked_high", "is_masked_high"),
        ("masked_low", "is_masked_low"),
    ):
        found[row] = _num_masked(batch, columns.get(column), chosen)
    for row, column in (("reward", "rewards"), ("advantage", "advantages")):
        own = _numbers(batch, row)
        found[row] = np.where(np.isfinite(own), own, _mean(batch, column, chosen))
    return found


def _num_masked(batch: ColumnBatch, values: NDArray[Any] | None, chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """None where the loss has no such mask."""
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    counts = _sum(batch, (values == 1) & chosen)
    decided = _sum(batch, np.isfinite(values)) if values.dtype.kind == "f" else np.ones_like(counts)
    return np.where(decided > 0, counts, np.nan)


def _sum(batch: ColumnBatch, values: NDArray[Any]) -> NDArray[np.float64]:
    return np.bincount(batch.owners, values, batch.num_sequences).astype(np.float64)


def _mean(batch: ColumnBatch, column: str | NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    values = batch.columns.get(column) if isinstance(column, str) else column
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    known = chosen & np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: NDArray[np.float64] = _sum(batch, np.where(known, values, 0.0)) / _sum(batch, known)
    return mean


def _largest(
    batch: ColumnBatch, column: str | NDArray[Any], chosen: NDArray[np.bool_]
) -> NDArray[np.float64]:
    values = batch.columns.get(column) if isinstance(column, str) else column
    found = np.full(batch.num_sequences, -np.inf)
    if values is not None:
        known = np.flatnonzero(chosen & np.isfinite(values))
        np.maximum.at(found, batch.owners[known], values[known])
    return np.where(np.isfinite(found), found, np.nan)


def _numbers(batch: ColumnBatch, name: str) -> NDArray[np.float64]:
    values = batch.columns.get(name)
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    if values.dtype.kind in "iufb":
        return values.astype(np.float64)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], np.float64)


def _word(value: Any) -> str:
    return "" if value is None or value != value else str(value)


def _sparks(batch: ColumnBatch) -> NDArray[np.uint8]:
    """The largest KL in each of 32 equal stretches of a record's trainable tokens; short ones repeat."""
    cells = np.zeros((batch.num_sequences, SPARK_CELLS))
    values = batch.columns.get("mismatch_kl")
    if values is not None:
        known = np.flatnonzero(trainable(batch) & np.isfinite(values))
        owners = batch.owners[known]
        counts = np.bincount(owners, minlength=batch.num_sequences)
        firsts = np.cumsum(counts) - counts
        places = (np.arange(len(known)) - firsts[owners]) * SPARK_CELLS // np.maximum(1, counts[owners])
        np.maximum.at(cells, (owners, places), values[known])
        for row in np.flatnonzero((counts > 0) & (counts < SPARK_CELLS)).tolist():
            own = values[known[firsts[row] : firsts[row] + counts[row]]]
            cells[row] = own[np.arange(SPARK_CELLS) * counts[row] // SPARK_CELLS]
    with np.errstate(divide="ignore"):
        level = (np.log10(cells) + SPARK_DECADES) / SPARK_DECADES
    return (np.clip(level, 0, 1) * 255).astype(np.uint8).ravel()
