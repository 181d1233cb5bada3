"""The head of a run, which every view needs at once: name, a few numbers per step, ledger, metrics, notes.

The same numbers by rank and policy version are an answer of their own, for whoever filters by them.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pellucid.data.alarms import Alarm
from pellucid.errors import printable
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.summary import kl_domain

API_VERSION = 1


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
) -> dict[str, Any]:
    """`held`: the steps whose tokens can be opened; `pending`: steps that are still being summarised."""
    return {
        "version": API_VERSION,
        "name": (run.folder or path).name,
        "steps": [
            {name: value for name, value in summary.items() if name != "slices"} for summary in summaries
        ],
        "held": list(held),
        "pending": pending,
        "live": live,
        "start_record": start_record,
        "kl_limits": kl_limits(summaries, max_mismatch),
        "metrics": run.metrics(),
        "ledger": run.ledger(),
        "alarms": [_described(alarm) for alarm in run.alarms()],
        "losses": run.losses(),
        "notes": [*notes, *run.problems],
    }


def _described(alarm: Alarm) -> dict[str, Any]:
    return {
        "name": printable(alarm.name),
        "step": alarm.step,
        "finding": alarm.finding(),
        "causes": printable(alarm.causes),
    }


def make_slices(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Step -> its points by environment, rank and policy version, see `summary.summarise`."""
    return {str(summary["step"]): summary["slices"] for summary in summaries if summary["slices"]}


def kl_limits(summaries: Sequence[Mapping[str, Any]], highest: float | None = None) -> list[float]:
    """[low, high] of the run's log scale: the p95 of trainable tokens, and three to four decades below it.

    Over several steps, the p95 is the mean of the steps' own, weighted by their tokens.
    """
    points = [summary["points"]["all"] for summary in summaries]
    known = [(point["kl_p95"], point["trainable"]) for point in points if point["kl_p95"] is not None]
    total = sum(weight for _, weight in known)
    mean = sum(value * weight for value, weight in known) / total if total else 0.0
    return kl_domain(mean) if highest is None else [highest * 1e-3, highest]


def as_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def deflate_json(value: Any) -> bytes:
    return zlib.compress(as_json(value), 6)
