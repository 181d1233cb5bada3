"""One step in a few numbers, for all records and per environment: the points of the run's curves.

Everything is over trainable tokens, but for staleness (sampled tokens) and what counts records.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.viewer.access import Record
from pellucid.viewer.rows import Rows, known_values

HISTOGRAM_BINS = 48
LIMITS = {
    "kl": ("mismatch_kl", 1),
    "entropy": ("entropy", 1),
    "surprise": ("trainer_logprobs", -1),
    "adv": ("advantages", 1),
    "reward": ("rewards", 1),
    "logratio": ("log_importance_ratio", 1),
    "delta": ("prob_delta", 1),
    "loss": ("token_loss", 1),
    "stale": ("policy_versions", -1),
}
"""What the page colours by -> (column, sign); staleness is the step minus the version."""

METRICS: Mapping[str, bool] = {
    "mismatch_kl": True,
    "importance_ratio": True,
    "entropy": False,
    "trainer_logprobs": False,
    "prob_delta": False,
    "advantages": False,
    "token_loss": False,
}
"""Metric -> whether its axis is logarithmic."""

KEPT = tuple(dict.fromkeys([*METRICS, *(column for column, _ in LIMITS.values())]))


class StepSummary:
    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[NDArray[np.float32]]]] = {}

    def add(self, record: Record) -> None:
        per_env = self._values.setdefault(record.env, {name: [] for name in KEPT})
        for name in KEPT:
            per_env[name].append(known_values(record, name).astype(np.float32))

    def finish(self, step: int, rows: Rows) -> dict[str, Any]:
        envs = np.array(rows.words["env"])
        numbers = {name: np.array(values, np.float64) for name, values in rows.numbers.items()}
        stops = np.array(rows.words["stop"])
        points = {"all": self._point(None, numbers, stops, np.ones(len(envs), np.bool_))}
        points |= {env: self._point(env, numbers, stops, envs == env) for env in sorted(set(envs.tolist()))}
        return {"step": step, "points": points, "limits": self._limits(step)}

    def histograms(self) -> dict[str, Any]:
        found = {name: histogram(self._all(name), log=log) for name, log in METRICS.items()}
        return {name: bins for name, bins in found.items() if bins is not None}

    def _limits(self, step: int) -> dict[str, list[float]]:
        """The p1 and p99 of what the page colours by; of the KL the p95, and three decades below it."""
        found = {}
        for key, (column, sign) in LIMITS.items():
            values = self._all(column)
            if not len(values):
                continue
            if key == "kl":
                high = max(float(np.quantile(values, 0.95)), 0.05)
                found[key] = [10.0 ** np.floor(np.log10(high) - 3), high]
            else:
                ends = sorted(float(end) * sign for end in np.quantile(values, [0.01, 0.99]))
                found[key] = [end + step for end in ends] if key == "stale" else ends
        return found

    def _all(self, name: str, env: str | None = None) -> NDArray[np.float32]:
        parts = [
            part for key, values in self._values.items() if env in (None, key) for part in values[name]
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _point(
        self, env: str | None, numbers: Mapping[str, NDArray[Any]], stops: NDArray[Any], chosen: NDArray[Any]
    ) -> dict[str, Any]:
        kl, entropy = self._all("mismatch_kl", env), self._all("entropy", env)
        trainable = np.nansum(numbers["trainable"][chosen])
        sampled = numbers["sampled"][chosen]
        lateness = numbers["staleness"][chosen]
        return {
            "records": int(chosen.sum()),
            "tokens": int(np.nansum(numbers["tokens"][chosen])),
            "trainable": int(trainable),
            "reward": _mean(numbers["reward"][chosen]),
            "kl_mean": _mean(kl),
            "kl_p99": float(np.quantile(kl, 0.99)) if len(kl) else None,
            "kl_max": float(kl.max()) if len(kl) else None,
            "kl_p95": float(np.quantile(kl, 0.95)) if len(kl) else None,
            "entropy": _mean(entropy),
            "masked_high": _share(numbers["masked_high"][chosen], trainable),
            "masked_low": _share(numbers["masked_low"][chosen], trainable),
            "truncated": float((stops[chosen] == "length").mean()) if (stops[chosen] != "").any() else None,
            "staleness": _weighted(lateness, sampled),
            "loss": _loss(numbers, chosen),
        }


def histogram(values: NDArray[Any], *, log: bool) -> dict[str, Any] | None:
    """Counts in equal bins over (p0.1, p99.9), the outermost taking what is beyond; None without values.

    On a log axis, what is not above 0 is counted as `zeros`.
    """
    zeros = 0
    if log:
        zeros = int((values <= 0).sum())
        values = np.log10(np.maximum(values[values > 0], 1e-12))
    if not len(values):
        return None
    low, high = (float(edge) for edge in np.quantile(values, [0.001, 0.999]))
    if high <= low:
        low, high = low - 0.5, low + 0.5
    counts, _ = np.histogram(np.clip(values, low, high), HISTOGRAM_BINS, (low, high))
    return {"low": low, "high": high, "log": log, "counts": counts.tolist(), "zeros": zeros}


def _mean(values: NDArray[Any]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.astype(np.float64).mean()) if len(known) else None


def _share(counts: NDArray[Any], total: float) -> float | None:
    return float(np.nansum(counts) / total) if total and np.isfinite(counts).any() else None


def _weighted(values: NDArray[Any], weights: NDArray[Any]) -> float | None:
    known = np.isfinite(values) & np.isfinite(weights)
    total = weights[known].sum()
    return float((values[known] * weights[known]).sum() / total) if total else None


def _loss(numbers: Mapping[str, NDArray[Any]], chosen: NDArray[Any]) -> float | None:
    """Sum of the token losses over the step's denominator: of all environments, the logged loss."""
    losses, denominators = numbers["loss"][chosen], numbers["denominator"][chosen]
    known = np.isfinite(losses) & np.isfinite(denominators)
    return float(losses[known].sum() / denominators[known][0]) if known.any() else None
