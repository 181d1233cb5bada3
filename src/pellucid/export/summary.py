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
      slices[]          counts, reward, entropy and mismatch KL by rank and policy version, see `slices`
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import neg, pos
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pellucid.errors import DataError
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.distribution import Distribution
from pellucid.export.slices import NEEDED as SLICED_BY
from pellucid.export.slices import Slices

VERSION = 2
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
NUM_WORST = 20
MAX_BLOCKS = 128

_Score = Callable[[Any], Any]

METRICS: Mapping[str, _Score] = {
    "trainer_logprobs": neg,
    "entropy": pos,
    "mismatch_kl": pos,
    "log_importance_ratio": abs,
    "importance_ratio": pos,
    "prob_delta": abs,
    "token_loss": abs,
    "advantages": abs,
}
"""Per-token columns that are summarised, and what makes a value stand out."""

_MASKS = {"masked": "is_masked", "masked_high": "is_masked_high", "masked_low": "is_masked_low"}
_COUNTED = ("sequences", "tokens", "trainable", *_MASKS)
_OWNER = ("rank", "export_sequence_idx", "rollout_id")

NEEDED = (
    *METRICS,
    *_MASKS.values(),
    *dict.fromkeys((*_OWNER, *SLICED_BY)),
    "env_name",
    "training_mode",
    "token_ids",
    "loss_mask",
    "position_ids",
    "reward",
)
"""Columns that a summary reads; any but `token_ids` may be missing."""


@dataclass(slots=True)
class PerPosition:
    """Sums over blocks of positions; the blocks grow so that there are never too many."""

    block: int = 1
    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, name: str, positions: NDArray[np.int64], values: Values) -> None:
        known = np.isfinite(values)
        positions, values = positions[known], values[known]
        if len(positions):
            while positions.max() // self.block >= MAX_BLOCKS:
                self._widen()
            places = positions // self.block
            self._put(name, np.bincount(places, values).astype(np.float64), np.bincount(places))

    def merge(self, other: "PerPosition") -> None:
        other = replace(other)  # widening it must not change the original
        while self.block < other.block:
            self._widen()
        while other.block < self.block:
            other._widen()
        for name, sums in other.sums.items():
            self._put(name, sums, other.counts[name])

    def means(self, name: str) -> Values:
        """NaN for a block without a token."""
        with np.errstate(invalid="ignore"):
            means: Values = self.sums[name] / self.counts[name]
        return means

    def _put(self, name: str, sums: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
        self.sums[name] = _plus(self.sums.get(name), sums)
        self.counts[name] = _plus(self.counts.get(name), counts)

    def _widen(self) -> None:
        self.block *= 2
        self.sums = {name: _pairs(values) for name, values in self.sums.items()}
        self.counts = {name: _pairs(values) for name, values in self.counts.items()}


def _plus(one: Values | None, other: Values) -> Values:
    if one is None:
        return other
    size = max(len(one), len(other))
    total: Values = np.pad(one, (0, size - len(one))) + np.pad(other, (0, size - len(other)))
    return total


def _pairs(values: Values) -> Values:
    total: Values = np.pad(values, (0, len(values) % 2)).reshape(-1, 2).sum(axis=1)
    return total


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
    slices: Slices = field(default_factory=Slices)

    def add(self, batch: ColumnBatch) -> None:
        columns = batch.columns
        trainable = columns.get("loss_mask", np.ones(batch.num_tokens, np.bool_)) == 1
        tokens = np.flatnonzero(trainable)
        self.counts["sequences"] += batch.num_sequences
        self.counts["tokens"] += batch.num_tokens
        self.counts["trainable"] += len(tokens)
        for name, column in _MASKS.items():
            if column in columns:
                self.counts[name] += int((columns[column][tokens] == 1).sum())
        self.slices.add(batch, tokens)
        self.length.add(batch.lengths.astype(np.float32))
        if "reward" in columns:
            self.reward.add(columns["reward"])
        positions = columns["position_ids"][tokens].astype(np.int64)
        for name, score in METRICS.items():
            if name in columns and np.isfinite(values := columns[name][tokens]).any():
                self.metrics.setdefault(name, Distribution()).add(values)
                self.positions.add(name, positions, values)
                self._keep_worst(name, _worst(batch, tokens, values, score))

    def merge(self, other: "Part") -> None:
        for name, count in other.counts.items():
            self.counts[name] += count
        self.reward.merge(other.reward)
        self.length.merge(other.length)
        self.positions.merge(other.positions)
        self.slices.merge(other.slices)
        for name, distribution in other.metrics.items():
            self.metrics.setdefault(name, Distribution()).merge(distribution)
            self._keep_worst(name, other.worst[name])

    def _keep_worst(self, name: str, tokens: Iterable[dict[str, Any]]) -> None:
        """Merges `tokens`, worst first, into those kept so far."""
        score, known = METRICS[name], self.worst.get(name, [])
        merged = heapq.merge(known, tokens, key=lambda token: (-score(token["value"]), *_place(token)))
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
            "slices": self.slices.as_dicts(),
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
            Slices.from_dicts(value["slices"]),
        )


def _worst(
    batch: ColumnBatch, tokens: NDArray[np.int64], values: Values, score: _Score
) -> Iterator[dict[str, Any]]:
    scores = np.where(np.isfinite(values), score(values), -np.inf)
    chosen = np.argpartition(-scores, NUM_WORST)[:NUM_WORST] if len(scores) > NUM_WORST else slice(None)
    chosen = np.arange(len(scores))[chosen]
    chosen = chosen[np.isfinite(scores[chosen])]
    chosen = chosen[np.lexsort((chosen, -scores[chosen]))]
    places = tokens[chosen]
    rows = batch.owners[places]
    columns = {
        "value": values[chosen],
        **{name: batch.columns[name][rows] for name in _OWNER if name in batch.columns},
        "token": places - batch.offsets[rows],
        "token_id": batch.columns["token_ids"][places],
    }
    for entry in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield dict(zip(columns, entry, strict=True))


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

    def add(self, batch: ColumnBatch) -> None:
        if not batch.num_sequences:
            return
        modes = batch.columns.get("training_mode", np.full(batch.num_sequences, "rl", object))
        envs = batch.columns.get("env_name", np.full(batch.num_sequences, "", object))
        rows: dict[tuple[str, str], list[int]] = {}
        for row, owner in enumerate(zip(envs, modes, strict=True)):
            rows.setdefault(owner, []).append(row)
        for (env, mode), own in sorted(rows.items()):
            part = self._parts.setdefault((env, mode), Part(env, mode))
            part.add(batch.take(np.array(own)))

    def merge(self, other: "StepSummary") -> None:
        for part in other.parts:
            own = self._parts.setdefault(
                (part.env_name, part.training_mode), Part(part.env_name, part.training_mode)
            )
            own.merge(part)

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "parts": [part.as_dict() for part in self.parts]}

    @staticmethod
    def is_current(value: Mapping[str, Any]) -> bool:
        """Whether a written summary has all that this version writes."""
        return value.get("version") == VERSION

    @classmethod
    def from_json(cls, text: bytes) -> "StepSummary | None":
        """None for a summary of another version, which has less, or what this one does not know."""
        try:
            value = orjson.loads(text)
            return cls.from_dict(value) if cls.is_current(value) else None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(f"not a summary: {error!r}") from error

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "StepSummary":
        if not cls.is_current(value):
            raise DataError(f"a summary of version {value.get('version')}; this reader knows {VERSION}")
        return cls(Part.from_dict(part) for part in value["parts"])
