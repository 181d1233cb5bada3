"""A run in a few numbers: a point of its curves per step, and the head that every view needs at once.

Everything is over trainable tokens, but for rewards and truncation, which are over records. The numbers are
those of the summaries beside the export: means and extremes exact, quantiles within 6 % of their value.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pellucid.data.schema import SUMMARISED
from pellucid.errors import printable
from pellucid.export.distribution import Distribution
from pellucid.export.summary import Part, Slice
from pellucid.viewer.access import RunFolder, StepSummary

CURVES = ("reward/", "zero_advantage_groups/", "off_policy_level/", "loss", "skipped_steps")
"""Metrics that every view may need, by how their names begin; the others are asked for."""

HISTOGRAM_BINS = 48
DEEPEST_AT_LEAST = 0.05
"""A mismatch KL that deserves the deepest colour even in a run that never reaches it."""


def summarise(step: int, summary: StepSummary, *, has_masks: bool = True) -> dict[str, Any]:
    """`has_masks`: whether the records say which tokens were masked.

    `slices` has a point for each environment, rank and policy version and for what they have in common, where
    there are several ranks or versions; with one of each, `points` says it all.
    """
    total = _together(summary.parts)
    points = {"all": _point(total, has_masks)}
    for name, group in groupby(summary.parts, key=lambda part: part.env_name):
        points[name] = _point(_together(list(group)), has_masks)  # a part for each training mode
    owners = [owner for owner, _ in total.slices]
    return {
        "step": step,
        "points": points,
        "limits": _limits(total),
        "ranks": sorted({rank for rank, _ in owners}),
        "versions": sorted({version for _, version in owners if version is not None}),
        "slices": list(_sliced(summary, has_masks)),
    }


def _together(parts: Sequence[Part]) -> Part:
    """Returns the numbers of all these parts."""
    if len(parts) == 1:
        return parts[0]
    total = Part("all", "")
    for part in parts:
        total.merge_numbers(part)
    return total


def histograms(summary: StepSummary) -> dict[str, Any]:
    metrics = _together(summary.parts).metrics
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
    reached = np.cumsum(counts) / counts.sum()
    places = np.minimum(np.searchsorted(reached, [0.001, 0.999]), len(middles) - 1)
    low, high = (float(end) for end in middles[places])
    if low == high:
        low, high = low - 0.5, low + 0.5
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    binned, _ = np.histogram(np.clip(middles, low, high), edges, weights=counts)
    return {"low": low, "high": high, "log": log, "counts": binned.astype(int).tolist(), "zeros": zeros}


def kl_domain(p95: float) -> list[float]:
    """[low, high] of a log scale: the p95, and three to four decades below it."""
    high = max(p95, DEEPEST_AT_LEAST)
    return [10.0 ** math.floor(math.log10(high) - 3), high]


def _point(part: Part | Slice, has_masks: bool) -> dict[str, Any]:
    if isinstance(part, Slice):
        kl, entropy = part.kl, part.entropy.mean
    else:
        kl = part.metrics.get("mismatch_kl", Distribution())
        entropy = part.metrics.get("entropy", Distribution()).mean
    p95, p99 = kl.quantiles((0.95, 0.99))
    trainable = part.counts["trainable"]
    has_masks = has_masks and kl.count > 0 and trainable > 0
    return {
        "records": part.counts["sequences"],
        "tokens": part.counts["tokens"],
        "trainable": trainable,
        "reward": part.reward.mean,
        "kl_mean": kl.mean,
        "kl_p95": p95,
        "kl_p99": p99,
        "kl_max": kl.max if kl.count else None,
        "entropy": entropy,
        "masked_high": part.counts["masked_high"] / trainable if has_masks else None,
        "masked_low": part.counts["masked_low"] / trainable if has_masks else None,
        "truncated": _truncated(part),
    }


def _sliced(summary: StepSummary, has_masks: bool) -> Iterator[dict[str, Any]]:
    """Yields a point per environment, rank and policy version; "all" or null stands for any of them."""
    parts = [(part.env_name, *owner, piece) for part in summary.parts for owner, piece in part.slices]
    if len({owner[1:3] for owner in parts}) < 2:
        return
    total: dict[tuple[str, int | None, int | None], Slice] = {}
    for env, rank, version, piece in parts:
        for owner in {*product(("all", env), (None, rank), (None, version))}:
            total.setdefault(owner, Slice()).merge(piece)
    for owner, piece in total.items():
        if owner[1:] != (None, None):
            names = dict(zip(("env", "rank", "version"), owner, strict=True))
            yield names | _point(piece, has_masks)


def _truncated(part: Part | Slice) -> float | None:
    """Returns the share of records that were cut by length, of those that say why sampling ended."""
    pieces = [part] if isinstance(part, Slice) else [piece for _, piece in part.slices]
    ended = sum(piece.counts["ended"] for piece in pieces)
    return sum(piece.counts["cut"] for piece in pieces) / ended if ended else None


def _limits(total: Part) -> dict[str, list[float]]:
    found = {}
    for name, shade in SUMMARISED.items():
        values, sign = total.metrics.get(name), -1 if shade.of == "negative" else 1
        if values is not None and name == "mismatch_kl":
            found[shade.key] = kl_domain(values.quantile(0.95) or 0.0)
        elif values is not None:
            found[shade.key] = sorted(sign * (value or 0.0) for value in values.quantiles((0.01, 0.99)))
    if total.reward.count:
        found["reward"] = [total.reward.min, total.reward.max]
    return found


def make_head(
    path: Path,
    run: RunFolder,
    summaries: Sequence[Mapping[str, Any]],
    *,
    held: Sequence[int],
    notes: Sequence[str],
    pending: int = 0,
    live: bool = False,
    start_record: int = 0,
    max_mismatch: float | None = None,
    metrics: Mapping[str, Any],
    rollouts: Mapping[str, Mapping[str, int]] | None = None,
    writing: bool = False,
    state: str = "",
    home: str = "",
    lacks: str = "",
) -> dict[str, Any]:
    """`held`: the steps whose tokens can be opened; `pending`: steps that are still being summarised;
    `rollouts`: saved ones, by step and outcome; `state`: changes whenever the head does; `lacks`: what
    another system's rollouts do not say."""
    alarms = [
        {
            "name": printable(alarm.name),
            "step": alarm.step,
            "finding": alarm.finding(),
            "causes": printable(alarm.causes),
        }
        for alarm in run.alarms()
    ]
    return {
        "version": 1,
        "name": (run.folder or path).name,
        "steps": [
            {name: value for name, value in summary.items() if name != "slices"} for summary in summaries
        ],
        "held": list(held),
        "pending": pending,
        "live": live,
        "start_record": start_record,
        "kl_limits": _kl_limits(summaries, max_mismatch),
        "metrics": {name: points for name, points in metrics.items() if name.startswith(CURVES)},
        "kind": run.kind,
        "in_run": run.folder is not None,
        "lacks": lacks,
        "rollouts": dict(rollouts or {}),
        "writing": writing,
        "state": state,
        "home": home,
        "ledger": run.ledger(),
        "alarms": alarms,
        "losses": run.losses(),
        "notes": [
            *(note for note in (run.lost_sequences(metrics),) if note),
            *notes,
            *run.problems,
            *(run.dump.problems if run.dump is not None else ()),
        ],
    }


def make_slices(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the points of each step by environment, rank and policy version."""
    return {str(summary["step"]): summary["slices"] for summary in summaries if summary["slices"]}


def _kl_limits(summaries: Sequence[Mapping[str, Any]], highest: float | None) -> list[float]:
    """[low, high] of the run's log scale: the p95 of trainable tokens, and three to four decades below it.

    Over several steps, the p95 is the mean of the steps' own, weighted by their tokens.
    """
    if highest is not None:
        return [highest * 1e-3, highest]
    points = [summary["points"]["all"] for summary in summaries]
    known = [(point["kl_p95"], point["trainable"]) for point in points if point["kl_p95"] is not None]
    total = sum(weight for _, weight in known)
    return kl_domain(sum(value * weight for value, weight in known) / total if total else 0.0)


def as_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
