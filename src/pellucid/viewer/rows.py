"""One row per record of a step: what its table, its groups and its summaries are made of.

    Identity    what the record says of itself: environment, group, reward, length; cheap to read
    Measures    what its tokens add up to: means and maxima over trainable tokens, a sparkline

NaN, or an empty word, where the record does not say.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data import TokenTable
from pellucid.viewer.access import trainable
from pellucid.viewer.blob import BlobWriter
from pellucid.viewer.vocabulary import shortened

SPARK_CELLS = 32
SPARK_DECADES = 6
"""A sparkline's cell holds the largest KL of its stretch, as 0 to 255 over 1e-6 … 1 on a log scale."""

WORDS = {
    "env": "env_name",
    "mode": "training_mode",
    "example": "example_id",
    "group": "group_id",
    "rollout": "rollout_id",
    "sample": "sample_id",
    "run": "run_id",
    "stop": "stop_reason",
}
NUMBERS = {
    "rank": "rank",
    "denominator": "denominator",
    "micro_step": "micro_step",
    "micro_sequence": "micro_sequence_idx",
    "export_index": "export_sequence_idx",
    "reward": "reward",
    "advantage": "advantage",
}
IDENTITY_FIELDS = (*WORDS.values(), *NUMBERS.values())
MEASURED_FIELDS = (
    "reward",
    "advantage",
    "loss_mask",
    "mismatch_kl",
    "entropy",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "token_loss",
    "policy_versions",
    "rewards",
    "advantages",
)


@dataclass
class Identity:
    words: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in WORDS})
    numbers: dict[str, list[NDArray[np.float64]]] = field(
        default_factory=lambda: {name: [] for name in ("tokens", *NUMBERS)}
    )

    def __len__(self) -> int:
        return len(self.words["env"])

    def add(self, batch: TokenTable) -> None:
        for name, column in WORDS.items():
            words = batch.get(column)
            self.words[name] += [""] * batch.num_sequences if words is None else map(_word, words)
        for name, column in NUMBERS.items():
            self.numbers[name].append(_numbers(batch, column))
        self.numbers["tokens"].append(batch.lengths.astype(np.float64))

    def write(self, blob: BlobWriter) -> dict[str, list[str]]:
        """The columns; words as codes. Returns the words by code."""
        codes = {}
        for name, parts in self.numbers.items():
            blob.add(name, np.concatenate(parts) if parts else np.empty(0))
        for name, words in self.words.items():
            distinct = list(dict.fromkeys(words))
            code_of = {word: code for code, word in enumerate(distinct)}
            blob.add(name, np.array([code_of[word] for word in words], np.int32))
            codes[name] = distinct
        return codes


@dataclass
class Measures:
    parts: list[dict[str, NDArray[Any]]] = field(default_factory=list)

    def add(self, batch: TokenTable) -> None:
        self.parts.append(_measure(batch) | {"sparks": _sparks(batch)})

    def encode(self, *, level: int | None) -> bytes:
        blob = BlobWriter()
        for name in self.parts[0] if self.parts else ():
            blob.add(name, np.concatenate([part[name] for part in self.parts]))
        return blob.finish({}, level=level)


def _measure(batch: TokenTable) -> dict[str, NDArray[Any]]:
    chosen = trainable(batch)
    nothing = np.full(batch.num_sequences, np.nan)
    versions = batch.get("policy_versions", np.full(batch.num_tokens, np.nan))
    seen = np.isfinite(versions) & (versions >= 0)
    found = {
        "trainable": _sum(batch, chosen) if "loss_mask" in batch else nothing,
        "kl_mean": _mean(batch, "mismatch_kl", chosen),
        "kl_max": _largest(batch, "mismatch_kl", chosen),
        "entropy": _mean(batch, "entropy", chosen),
        "loss": _sum(batch, np.nan_to_num(batch["token_loss"])) if "token_loss" in batch else nothing,
        "version_low": -_largest(batch, -versions, seen),
        "version_high": _largest(batch, versions, seen),
    }
    for row in ("masked", "masked_high", "masked_low"):
        found[row] = _num_masked(batch, batch.get(f"is_{row}"), chosen)
    for row, column in (("reward", "rewards"), ("advantage", "advantages")):
        own = _numbers(batch, row)
        found[row] = np.where(np.isfinite(own), own, _mean(batch, column, chosen))
    return found


def _num_masked(batch: TokenTable, values: NDArray[Any] | None, chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """None where the loss has no such mask."""
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    counts = _sum(batch, (values == 1) & chosen)
    decided = _sum(batch, np.isfinite(values)) if values.dtype.kind == "f" else np.ones_like(counts)
    return np.where(decided > 0, counts, np.nan)


def _sum(batch: TokenTable, values: NDArray[Any]) -> NDArray[np.float64]:
    """Sums per record, in float64."""
    total = np.zeros(batch.num_sequences)
    filled = np.flatnonzero(batch.lengths)
    if len(filled):
        total[filled] = np.add.reduceat(values.astype(np.float64), batch.token_offsets[filled])
    return total


def _mean(batch: TokenTable, column: str, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    values = batch.get(column)
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    known = chosen & np.isfinite(values)
    with np.errstate(invalid="ignore"):
        mean: NDArray[np.float64] = _sum(batch, np.where(known, values, 0.0)) / _sum(batch, known)
    return mean


def _largest(batch: TokenTable, column: str | NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    values = batch.get(column) if isinstance(column, str) else column
    found = np.full(batch.num_sequences, -np.inf)
    filled = np.flatnonzero(batch.lengths)
    if values is not None and len(filled):
        known = np.where(chosen & np.isfinite(values), values, -np.inf)
        found[filled] = np.maximum.reduceat(known, batch.token_offsets[filled])
    return np.where(np.isfinite(found), found, np.nan)


def _numbers(batch: TokenTable, name: str) -> NDArray[np.float64]:
    values = batch.get(name)
    if values is None:
        return np.full(batch.num_sequences, np.nan)
    if values.dtype.kind in "iufb":
        return values.astype(np.float64)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], np.float64)


def _word(value: Any) -> str:
    return "" if value is None or value != value else shortened(str(value))


def _sparks(batch: TokenTable) -> NDArray[np.uint8]:
    """The largest KL in each of 32 equal stretches of a record's trainable tokens; short ones repeat."""
    cells = np.zeros((batch.num_sequences, SPARK_CELLS))
    values = batch.get("mismatch_kl")
    if values is not None:
        chosen = trainable(batch) & np.isfinite(values)
        known = values[chosen]
        counts = _sum(batch, chosen).astype(np.int64)
        firsts = np.cumsum(counts) - counts
        filled = np.flatnonzero(counts)
        edges = firsts[filled, None] + np.arange(SPARK_CELLS) * counts[filled, None] // SPARK_CELLS
        if len(filled):
            cells[filled] = np.maximum.reduceat(known, edges.ravel()).reshape(-1, SPARK_CELLS)
    with np.errstate(divide="ignore"):
        level = (np.log10(cells) + SPARK_DECADES) / SPARK_DECADES
    return (np.clip(level, 0, 1) * 255).astype(np.uint8).ravel()
