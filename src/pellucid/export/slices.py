"""A step's numbers for part of its records: by rank, and by the weights that sampled them.

    rank 0, version 36     64 sequences, 2,048 tokens, 1,204 trainable, …
    rank 0, version 35     64 sequences, …

A record belongs to the lowest policy version of its tokens, the oldest weights that had a part in it; to None
where versions are not recorded. Slices add up to their part of the summary.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.distribution import Distribution

NEEDED = ("rank", "policy_versions", "stop_reason")
"""Columns that slices read beside those of the summary."""

_MASKS = {"masked_high": "is_masked_high", "masked_low": "is_masked_low"}
_COUNTED = ("sequences", "tokens", "trainable", *_MASKS, "ended", "cut")
_NO_VERSION = np.iinfo(np.int64).max

Owner = tuple[int, int | None]
"""Rank and policy version."""


@dataclass(slots=True)
class RunningMean:
    sum: float = 0.0
    count: int = 0

    def add(self, values: Values) -> None:
        known = values[np.isfinite(values)].astype(np.float64)
        self.sum += float(known.sum())
        self.count += len(known)

    def merge(self, other: "RunningMean") -> None:
        self.sum += other.sum
        self.count += other.count

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


@dataclass(slots=True)
class Slice:
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    """`ended`: sequences that say why sampling ended; `cut`: those of them that were cut by length."""

    reward: RunningMean = field(default_factory=RunningMean)
    entropy: RunningMean = field(default_factory=RunningMean)
    kl: Distribution = field(default_factory=Distribution)

    def add(self, batch: ColumnBatch, rows: NDArray[np.bool_], tokens: NDArray[np.int64]) -> None:
        """`rows`: which sequences; `tokens`: the trainable tokens of them."""
        columns = batch.columns
        self.counts["sequences"] += int(rows.sum())
        self.counts["tokens"] += int(batch.lengths[rows].sum())
        self.counts["trainable"] += len(tokens)
        for name, column in _MASKS.items():
            if column in columns:
                self.counts[name] += int((columns[column][tokens] == 1).sum())
        if "stop_reason" in columns:
            reasons = [reason for reason in columns["stop_reason"][rows] if reason]
            self.counts["ended"] += len(reasons)
            self.counts["cut"] += reasons.count("length")
        if "reward" in columns:
            self.reward.add(columns["reward"][rows])
        if "entropy" in columns:
            self.entropy.add(columns["entropy"][tokens])
        if "mismatch_kl" in columns:
            self.kl.add(columns["mismatch_kl"][tokens])

    def merge(self, other: "Slice") -> None:
        for name, count in other.counts.items():
            self.counts[name] += count
        self.reward.merge(other.reward)
        self.entropy.merge(other.entropy)
        self.kl.merge(other.kl)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.counts,
            "reward": [self.reward.sum, self.reward.count],
            "entropy": [self.entropy.sum, self.entropy.count],
            "mismatch_kl": self.kl.as_dict(()),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Slice":
        return cls(
            {name: value[name] for name in _COUNTED},
            RunningMean(*value["reward"]),
            RunningMean(*value["entropy"]),
            Distribution.from_dict(value["mismatch_kl"]),
        )


class Slices:
    def __init__(self) -> None:
        self._of: dict[Owner, Slice] = {}

    def __iter__(self) -> Iterator[tuple[Owner, Slice]]:
        """In the order of rank and version."""
        yield from sorted(self._of.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1]))

    def __getitem__(self, owner: Owner) -> Slice:
        return self._of.setdefault(owner, Slice())

    def add(self, batch: ColumnBatch, trainable: NDArray[np.int64]) -> None:
        """`trainable`: the trainable tokens of the batch."""
        ranks = batch.columns.get("rank", np.zeros(batch.num_sequences, np.int64)).astype(np.int64)
        versions = oldest_versions(batch)
        for rank, version in {*zip(ranks.tolist(), versions.tolist(), strict=True)}:
            rows = (ranks == rank) & (versions == version)
            tokens = trainable if rows.all() else trainable[rows[batch.owners[trainable]]]
            self[rank, None if version == _NO_VERSION else version].add(batch, rows, tokens)

    def merge(self, other: "Slices") -> None:
        for owner, part in other:
            self[owner].merge(part)

    def as_dicts(self) -> list[dict[str, Any]]:
        return [{"rank": rank, "version": version, **part.as_dict()} for (rank, version), part in self]

    @classmethod
    def from_dicts(cls, values: Iterable[Mapping[str, Any]]) -> "Slices":
        slices = cls()
        for value in values:
            slices._of[value["rank"], value["version"]] = Slice.from_dict(value)
        return slices


def oldest_versions(batch: ColumnBatch) -> NDArray[np.int64]:
    """Returns the lowest version of each sequence's tokens; the largest integer where none is known."""
    found = np.full(batch.num_sequences, _NO_VERSION)
    versions = batch.columns.get("policy_versions")
    filled = np.flatnonzero(batch.lengths)
    if versions is not None and len(filled):
        numbers = np.nan_to_num(versions, nan=-1).astype(np.int64)  # before anything as large as _NO_VERSION
        known = np.where(numbers >= 0, numbers, _NO_VERSION)
        found[filled] = np.minimum.reduceat(known, batch.offsets[filled])
    return found
