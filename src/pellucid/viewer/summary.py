"""One step in a few numbers, for all records and per environment: the points of the run's curves.

Everything is over trainable tokens, but for rewards and truncation, which are over records. The numbers are
those of the summaries beside the export: means and extremes exact, quantiles within 6 % of their value.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.schema import SUMMARISED
from pellucid.export.distribution import Distribution
from pellucid.export.summary import Part, Slice
from pellucid.viewer.access import StepSummary

HISTOGRAM_BINS = 48
DEEPEST_AT_LEAST = 0.05
"""A mismatch KL that deserves the deepest colour even in a run that never reaches it."""


def summarise(
    step: int, summary: StepSummary, stops: Sequence[str] = (), envs: Sequence[str] = ()
) -> dict[str, Any]:
    """`stops`, `envs`: why sampling ended, and the environment, of each record.

    `slices` has a point for each environment, rank and policy version and for what they have in common, where
    there are several ranks or versions; with one of each, `points` says it all.
    """
    total = summary.total()
    points = {"all": _point(total, _truncated(stops))}
    names = sorted({part.env_name for part in summary.parts})
    for name in names:
        own = [stop for stop, env in zip(stops, envs, strict=True) if env == name]
        points[name] = _point(_of_env(summary, name), _truncated(own))
    owners = [owner for owner, _ in total.slices]
    return {
        "step": step,
        "points": points,
        "limits": _limits(total),
        "ranks": sorted({rank for rank, _ in owners}),
        "versions": sorted({version for _, version in owners if version is not None}),
        "slices": list(_sliced(summary)),
    }


def histograms(summary: StepSummary) -> dict[str, Any]:
    metrics = summary.total().metrics
    found = {
        name: histogram(metrics[name], log=shade.scale == "log")
        for name, shade in SUMMARISED.items()
        if name in metrics
    }
    return {name: bins for name, bins in found.items() if bins is not None}


def histogram(values: Distribution, *, log: bool) -> dict[str, Any] | None:
    """Counts in equal bins over (p0.1, p99.9), the outermost taking what is beyond; None without values.

    On a log axis, what is not above 0 is counted as `zeros`.
    """
    lower, upper, counts = values.histogram()
    middles = (lower.astype(np.float64) + upper) / 2
    zeros = 0
    if log:
        positive = middles > 1e-12
        zeros = int(counts[~positive].sum())
        middles, counts = np.log10(middles[positive]), counts[positive]
    if not counts.sum():
        return None
    low, high = _ends(middles, counts)
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    binned, _ = np.histogram(np.clip(middles, low, high), edges, weights=counts)
    return {"low": low, "high": high, "log": log, "counts": binned.astype(int).tolist(), "zeros": zeros}


def kl_domain(p95: float) -> list[float]:
    """[low, high] of a log scale: the p95, and three to four decades below it."""
    high = max(p95, DEEPEST_AT_LEAST)
    return [10.0 ** math.floor(math.log10(high) - 3), high]


def _ends(middles: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    reached = np.cumsum(counts) / counts.sum()
    places = np.minimum(np.searchsorted(reached, [0.001, 0.999]), len(middles) - 1)
    low, high = (float(end) for end in middles[places])
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _of_env(summary: StepSummary, env: str) -> Part:
    """All training modes of an environment together."""
    total = Part(env, "")
    for part in summary.parts:
        if part.env_name == env:
            total.merge(part)
    return total


def _point(part: Part, truncated: float | None) -> dict[str, Any]:
    kl, entropy = part.metrics.get("mismatch_kl"), part.metrics.get("entropy")
    trainable = part.counts["trainable"]
    has_masks = kl is not None and trainable > 0
    return {
        "records": part.counts["sequences"],
        "tokens": part.counts["tokens"],
        "trainable": trainable,
        "reward": part.reward.mean,
        "kl_mean": kl.mean if kl else None,
        "kl_p95": kl.quantile(0.95) if kl else None,
        "kl_p99": kl.quantile(0.99) if kl else None,
        "kl_max": kl.max if kl else None,
        "entropy": entropy.mean if entropy else None,
        "masked_high": part.counts["masked_high"] / trainable if has_masks else None,
        "masked_low": part.counts["masked_low"] / trainable if has_masks else None,
        "truncated": truncated,
    }


def _sliced(summary: StepSummary) -> Iterator[dict[str, Any]]:
    """Yields a point per environment, rank and policy version; "all" or null stands for any of them."""
    parts = [(part.env_name, *owner, own) for part in summary.parts for owner, own in part.slices]
    if len({owner[1:3] for owner in parts}) < 2:
        return
    total: dict[tuple[str, int | None, int | None], Slice] = {}
    for env, rank, version, own in parts:
        for owner in {*product(("all", env), (None, rank), (None, version))}:
            total.setdefault(owner, Slice()).merge(own)
    for owner, own in total.items():
        if owner[1:] != (None, None):
            yield dict(zip(("env", "rank", "version"), owner, strict=True)) | _point_of_slice(own)


def _point_of_slice(own: Slice) -> dict[str, Any]:
    counts, kl = own.counts, own.kl
    share = 1 / counts["trainable"] if kl.count and counts["trainable"] else None
    return {
        "records": counts["sequences"],
        "tokens": counts["tokens"],
        "trainable": counts["trainable"],
        "reward": own.reward.mean,
        "kl_mean": kl.mean,
        "kl_p95": kl.quantile(0.95),
        "kl_p99": kl.quantile(0.99),
        "kl_max": kl.max if kl.count else None,
        "entropy": own.entropy.mean,
        "masked_high": None if share is None else counts["masked_high"] * share,
        "masked_low": None if share is None else counts["masked_low"] * share,
        "truncated": counts["cut"] / counts["ended"] if counts["ended"] else None,
    }


def _truncated(stops: Sequence[str]) -> float | None:
    known = [stop for stop in stops if stop]
    return sum(stop == "length" for stop in known) / len(known) if known else None


def _limits(total: Part) -> dict[str, list[float]]:
    found = {}
    for name, shade in SUMMARISED.items():
        values, sign = total.metrics.get(name), -1 if shade.of == "negative" else 1
        if values is not None and name == "mismatch_kl":
            found[shade.key] = kl_domain(values.quantile(0.95) or 0.0)
        elif values is not None:
            found[shade.key] = sorted(sign * (values.quantile(share) or 0.0) for share in (0.01, 0.99))
    if total.reward.count:
        found["reward"] = [total.reward.min, total.reward.max]
    return found
