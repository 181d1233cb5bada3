"""Summaries of a step's tokens, so that readers need not read them:
`token_exports/step_N/summary.rank_R.json`.

Each rank writes one from the records as they pass, and the reader merges them. Everything adds up, so packing
and ranks do not change it (but for which of several equal tokens is named). Trainable tokens only.

    parts[]   one per environment and training mode
      sequences, tokens, trainable, masked, masked_high, masked_low      counts
      reward, length                                                     distributions over sequences
      metrics.NAME                                                       a distribution over tokens
      positions.NAME    sums and counts over blocks of `block` positions
      worst.NAME        the K tokens that stand out most: value, record, token, id
      slices[]          counts, reward, entropy and mismatch KL by rank and policy version, see `Slice`
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pellucid.data.schema import SUMMARISED, Shade
from pellucid.data.table import TokenTable, Values
from pellucid.errors import DataError
from pellucid.export.distribution import Distribution, PerPosition, RunningMean

VERSION = 2
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
NUM_WORST = 20

_MASKS = {"masked": "is_masked", "masked_high": "is_masked_high", "masked_low": "is_masked_low"}
_COUNTED = ("sequences", "tokens", "trainable", *_MASKS)
_OWNER = ("rank", "export_sequence_idx", "rollout_id")
_SLICE_COUNTED = ("sequences", "tokens", "trainable", "masked_high", "masked_low", "ended", "cut")
_NO_VERSION = np.iinfo(np.int64).max

Owner = tuple[int, int | None]
"""Rank and policy version."""

NEEDED = (
    *(*SUMMARISED, *_MASKS.values(), *_OWNER, "policy_versions", "stop_reason", "env_name"),
    *("training_mode", "token_ids", "loss_mask", "position_ids", "reward"),
)
"""Columns that a summary reads; any but `token_ids` may be missing."""


@dataclass(slots=True)
class Slice:
    """A step's numbers for the records of one rank that the same weights sampled.

        rank 0, version 36     64 sequences, 2,048 tokens, 1,204 trainable, …

    A record belongs to the lowest policy version of its tokens, the oldest weights that had a part in it; to
    None where versions are not recorded. Slices add up to their part of the summary.
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SLICE_COUNTED, 0))
    """`ended`: sequences that say why sampling ended; `cut`: those of them that were cut by length."""

    reward: RunningMean = field(default_factory=RunningMean)
    entropy: RunningMean = field(default_factory=RunningMean)
    kl: Distribution = field(default_factory=Distribution)

    def add(self, batch: TokenTable, rows: NDArray[np.bool_], tokens: NDArray[np.int64]) -> None:
        """`rows`: which sequences; `tokens`: the trainable tokens of them."""
        self.counts["sequences"] += int(rows.sum())
        self.counts["tokens"] += int(batch.lengths[rows].sum())
        self.counts["trainable"] += len(tokens)
        for name, column in _MASKS.items():
            if name in self.counts and column in batch:
                self.counts[name] += int((batch[column][tokens] == 1).sum())
        if "stop_reason" in batch:
            reasons = [reason for reason in batch["stop_reason"][rows] if reason]
            self.counts["ended"] += len(reasons)
            self.counts["cut"] += reasons.count("length")
        if "reward" in batch:
            self.reward.add(batch["reward"][rows])
        if "entropy" in batch:
            self.entropy.add(batch["entropy"][tokens])
        if "mismatch_kl" in batch:
            self.kl.add(batch["mismatch_kl"][tokens])

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
            {name: value[name] for name in _SLICE_COUNTED},
            RunningMean(*value["reward"]),
            RunningMean(*value["entropy"]),
            Distribution.from_dict(value["mismatch_kl"]),
        )


def oldest_versions(batch: TokenTable) -> NDArray[np.int64]:
    """Returns the lowest version of each sequence's tokens; the largest integer where none is known."""
    found = np.full(batch.num_sequences, _NO_VERSION)
    versions = batch.get("policy_versions")
    filled = np.flatnonzero(batch.lengths)
    if versions is not None and len(filled):
        numbers = np.nan_to_num(versions, nan=-1).astype(np.int64)  # before anything as large as _NO_VERSION
        known = np.where(numbers >= 0, numbers, _NO_VERSION)
        found[filled] = np.minimum.reduceat(known, batch.token_offsets[filled])
    return found


@dataclass(slots=True)
class Part:
    """The tokens of one environment in one training mode."""

    env_name: str
    training_mode: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    reward: Distribution = field(default_factory=Distribution)
    length: Distribution = field(default_factory=Distribution)
    metrics: dict[str, Distribution] = field(default_factory=dict)
    positions: PerPosition = field(default_factory=PerPosition)
    worst: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _slices: dict[Owner, Slice] = field(default_factory=dict)

    @property
    def slices(self) -> list[tuple[Owner, Slice]]:
        """Slices in the order of rank and version."""
        return sorted(self._slices.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1]))

    def add(self, batch: TokenTable) -> None:
        trainable = batch.get("loss_mask", np.ones(batch.num_tokens, np.bool_)) == 1
        tokens = np.flatnonzero(trainable)
        self.counts["sequences"] += batch.num_sequences
        self.counts["tokens"] += batch.num_tokens
        self.counts["trainable"] += len(tokens)
        for name, column in _MASKS.items():
            if column in batch:
                self.counts[name] += int((batch[column][tokens] == 1).sum())
        self._add_slices(batch, tokens)
        self.length.add(batch.lengths.astype(np.float32))
        if "reward" in batch:
            self.reward.add(batch["reward"])
        positions = batch["position_ids"][tokens].astype(np.int64)
        for name, shade in SUMMARISED.items():
            if name in batch and np.isfinite(values := batch[name][tokens]).any():
                self.metrics.setdefault(name, Distribution()).add(values)
                self.positions.add(name, positions, values)
                self._keep_worst(name, _worst(batch, tokens, values, shade))

    def _add_slices(self, batch: TokenTable, trainable: NDArray[np.int64]) -> None:
        """`trainable`: the trainable tokens of the batch."""
        ranks = batch.get("rank", np.zeros(batch.num_sequences, np.int64)).astype(np.int64)
        versions = oldest_versions(batch)
        for rank, version in {*zip(ranks.tolist(), versions.tolist(), strict=True)}:
            rows = (ranks == rank) & (versions == version)
            tokens = trainable if rows.all() else trainable[rows[batch.owners[trainable]]]
            owner = rank, None if version == _NO_VERSION else version
            self._slices.setdefault(owner, Slice()).add(batch, rows, tokens)

    def merge(self, other: "Part") -> None:
        self.merge_numbers(other)
        self.positions.merge(other.positions)
        for name in other.metrics:
            self._keep_worst(name, other.worst[name])

    def merge_numbers(self, other: "Part") -> None:
        """Merges everything but the means by position and the worst tokens, which take as long again."""
        for name, count in other.counts.items():
            self.counts[name] += count
        self.reward.merge(other.reward)
        self.length.merge(other.length)
        for owner, part in other._slices.items():
            self._slices.setdefault(owner, Slice()).merge(part)
        for name, distribution in other.metrics.items():
            self.metrics.setdefault(name, Distribution()).merge(distribution)

    def _keep_worst(self, name: str, tokens: Iterable[dict[str, Any]]) -> None:
        """Merges `tokens`, worst first, into those kept so far."""
        shade, known = SUMMARISED[name], self.worst.get(name, [])
        merged = heapq.merge(
            known, tokens, key=lambda token: (-_score(token["value"], shade), *_place(token))
        )
        self.worst[name] = list(islice(merged, NUM_WORST)) if known else list(tokens)

    def as_dict(self) -> dict[str, Any]:
        return {
            "env_name": self.env_name,
            "training_mode": self.training_mode,
            **self.counts,
            "reward": self.reward.as_dict(QUANTILES),
            "length": self.length.as_dict(QUANTILES),
            "metrics": {name: metric.as_dict(QUANTILES) for name, metric in self.metrics.items()},
            "block": self.positions.block,
            "positions": {
                name: {"sums": sums.tolist(), "counts": self.positions.counts[name].tolist()}
                for name, sums in self.positions.sums.items()
            },
            "worst": self.worst,
            "slices": [
                {"rank": rank, "version": version, **part.as_dict()} for (rank, version), part in self.slices
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Part":
        positions = value["positions"].items()
        return cls(
            value["env_name"],
            value["training_mode"],
            {name: value[name] for name in _COUNTED},
            Distribution.from_dict(value["reward"]),
            Distribution.from_dict(value["length"]),
            {name: Distribution.from_dict(metric) for name, metric in value["metrics"].items()},
            PerPosition(
                value["block"],
                {name: np.array(entry["sums"], np.float64) for name, entry in positions},
                {name: np.array(entry["counts"], np.int64) for name, entry in positions},
            ),
            dict(value["worst"]),
            {(part["rank"], part["version"]): Slice.from_dict(part) for part in value["slices"]},
        )


def _worst(
    batch: TokenTable, tokens: NDArray[np.int64], values: Values, shade: Shade
) -> Iterator[dict[str, Any]]:
    scores = np.where(np.isfinite(values), _score(values, shade), -np.inf)
    chosen = np.argpartition(-scores, NUM_WORST)[:NUM_WORST] if len(scores) > NUM_WORST else slice(None)
    chosen = np.arange(len(scores))[chosen]
    chosen = chosen[np.isfinite(scores[chosen])]
    chosen = chosen[np.lexsort((chosen, -scores[chosen]))]
    places = tokens[chosen]
    rows = batch.owners[places]
    columns = {
        "value": values[chosen],
        **{name: batch[name][rows] for name in _OWNER if name in batch},
        "token": places - batch.token_offsets[rows],
        "token_id": batch["token_ids"][places],
    }
    for entry in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield dict(zip(columns, entry, strict=True))


def _score(value: Any, shade: Shade) -> Any:
    """Returns how much a value stands out, or each of an array."""
    return -value if shade.of == "negative" else abs(value) if shade.scale == "diverging" else value


def _place(token: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(token.get(key, 0) for key in ("rank", "export_sequence_idx", "token"))


class StepSummary:
    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts = {(part.env_name, part.training_mode): part for part in parts}

    @property
    def parts(self) -> list[Part]:
        """One per environment and training mode, in order."""
        return [self._parts[key] for key in sorted(self._parts)]

    def total(self) -> Part:
        """All environments and modes together."""
        total = Part("all", "")
        for part in self.parts:
            total.merge(part)
        return total

    def add(self, batch: TokenTable) -> None:
        if not batch.num_sequences:
            return
        modes = batch.get("training_mode", np.full(batch.num_sequences, "rl", object))
        envs = batch.get("env_name", np.full(batch.num_sequences, "", object))
        rows: dict[tuple[str, str], list[int]] = {}
        for row, owner in enumerate(zip(envs, modes, strict=True)):
            rows.setdefault(owner, []).append(row)
        for owner, members in sorted(rows.items()):
            self._parts.setdefault(owner, Part(*owner)).add(batch.select(members))

    def merge(self, other: "StepSummary") -> None:
        for part in other.parts:
            owner = part.env_name, part.training_mode
            self._parts.setdefault(owner, Part(*owner)).merge(part)

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "parts": [part.as_dict() for part in self.parts]}

    @classmethod
    def from_json(cls, text: bytes) -> "StepSummary | None":
        """None for a summary of another version, which has less, or what this one does not know."""
        try:
            value = orjson.loads(text)
            return cls.from_dict(value) if value.get("version") == VERSION else None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(f"not a summary: {error!r}") from error

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "StepSummary":
        if value.get("version") != VERSION:
            raise DataError(f"a summary of version {value.get('version')}; this reader knows {VERSION}")
        return cls(Part.from_dict(part) for part in value["parts"])
