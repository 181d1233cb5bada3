"""One row per record of a step: what its table, its groups and its summaries are made of.

Means and maxima are over trainable tokens. None where the record does not say.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.viewer.access import Record
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
    numbers: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NUMBERS})
    words: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in WORDS})
    sparks: list[NDArray[np.uint8]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sparks)

    def add(self, record: Record) -> None:
        row = _row(record)
        for name in NUMBERS:
            self.numbers[name].append(row[name])
        for name in WORDS:
            value = record.fields.get(_FIELDS[name])
            self.words[name].append("" if value is None else str(value))
        self.sparks.append(_spark(record))

    def write(self, blob: BlobWriter) -> dict[str, list[str]]:
        """The columns; words as codes. Returns the words by code."""
        codes = {}
        for name, values in self.numbers.items():
            blob.add(name, np.array(values, np.float64))
        for name, words in self.words.items():
            distinct = list(dict.fromkeys(words))
            code_of = {word: code for code, word in enumerate(distinct)}
            blob.add(name, np.array([code_of[word] for word in words], np.int32))
            codes[name] = distinct
        blob.add("sparks", np.concatenate(self.sparks) if self.sparks else np.zeros(0, np.uint8))
        return codes


def _row(record: Record) -> dict[str, float]:
    columns, trainable = record.columns, record.trainable
    row = {name: _number(record.fields.get(field_name)) for name, field_name in _FIELDS.items()}
    kl = known_values(record, "mismatch_kl")
    entropy = known_values(record, "entropy")
    versions = columns.get("policy_versions")
    seen = versions[np.isfinite(versions) & (versions >= 0)] if versions is not None else np.empty(0)
    sampled = columns.get("sampled")
    return row | {
        "tokens": record.num_tokens,
        "trainable": int(trainable.sum()) if "loss_mask" in columns else np.nan,
        "sampled": int((sampled == 1).sum()) if sampled is not None else np.nan,
        "reward": record.overall("reward", "rewards"),
        "advantage": record.overall("advantage", "advantages"),
        "kl_mean": float(kl.mean()) if len(kl) else np.nan,
        "kl_max": float(kl.max()) if len(kl) else np.nan,
        "entropy": float(entropy.mean()) if len(entropy) else np.nan,
        "masked": _num_masked(record, "is_masked"),
        "masked_high": _num_masked(record, "is_masked_high"),
        "masked_low": _num_masked(record, "is_masked_low"),
        "loss": float(np.nansum(columns["token_loss"])) if "token_loss" in columns else np.nan,
        "version_low": float(seen.min()) if len(seen) else np.nan,
        "version_high": float(seen.max()) if len(seen) else np.nan,
        "staleness": float(record.step - seen.mean()) if len(seen) else np.nan,
    }


def known_values(record: Record, name: str) -> NDArray[Any]:
    """The recorded values of the trainable tokens."""
    values = record.columns.get(name)
    if values is None:
        return np.empty(0)
    known: NDArray[Any] = values[record.trainable & np.isfinite(values)]
    return known


def _num_masked(record: Record, name: str) -> float:
    values = record.columns.get(name)
    if values is None or not np.isfinite(values).any():
        return np.nan
    return float(((values == 1) & record.trainable).sum())


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _spark(record: Record) -> NDArray[np.uint8]:
    """The largest KL (or, without one, entropy) in each of 32 equal stretches of the trainable tokens."""
    values = known_values(record, "mismatch_kl")
    if not len(values):
        return np.zeros(SPARK_CELLS, np.uint8)
    cells = np.arange(len(values)) * SPARK_CELLS // len(values)
    largest = np.zeros(SPARK_CELLS)
    np.maximum.at(largest, cells, values)
    if len(values) < SPARK_CELLS:  # each value fills the cells up to the next one
        largest = values[np.arange(SPARK_CELLS) * len(values) // SPARK_CELLS]
    with np.errstate(divide="ignore"):
        level = (np.log10(largest) + SPARK_DECADES) / SPARK_DECADES
    return (np.clip(level, 0, 1) * 255).astype(np.uint8)
