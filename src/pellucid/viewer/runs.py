"""Folders that hold several runs: finding them, and listing them for a terminal or a browser."""

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pellucid.errors import printable
from pellucid.viewer.access import Exports, RunFolder, is_run
from pellucid.viewer.frame import frame

MAX_RUNS = 500


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Returns the run folders at or below a folder, those that changed last first; follows no links."""
    found: list[Path] = []
    left = [(folder, depth)]
    while left and len(found) < MAX_RUNS:
        place, levels = left.pop(0)
        if is_run(place):
            found.append(place)
        elif levels and place.is_dir():
            inside = sorted(place.iterdir())
            left += [
                (below, levels - 1)
                for below in inside
                if not below.name.startswith(".") and below.is_dir() and not below.is_symlink()
            ]
    return sorted(found, key=lambda run: -RunFolder(run).written_at())


def describe(run: Path, shown_from: Path) -> dict[str, str]:
    """Returns what a list says of a run, in columns."""
    folder = RunFolder(run)
    metrics = folder.metrics()
    name, label = ("loss", "loss") if folder.kind == "sft" else ("reward/all", "reward")
    curve = metrics.get(name, [])
    num_steps = max((len(points) for points in metrics.values()), default=0)
    has_tokens = not Exports(run).lacks_tokens()
    ago = max(0.0, time.time() - folder.written_at())
    return {
        "run": printable(str(run.relative_to(shown_from)) if run.is_relative_to(shown_from) else str(run)),
        "kind": folder.kind,
        "steps": f"{num_steps:,}",
        "last": f"{label} {curve[-1][1]:.4g}" if curve else "",
        "tokens": "exported" if has_tokens else "no export",
        "changed": "being written" if folder.is_being_written(time.time()) else f"{_span(ago)} ago",
    }


def run_table(runs: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in runs[0]:
        table.add_column(title, overflow="fold", justify="right" if title == "steps" else "left")
    for run in runs:
        table.add_row(*map(Text, run.values()))
    return table


def list_page(folder: Path, runs: Sequence[Mapping[str, str]]) -> str:
    """Returns a page of links, without any script: run N is below `N/`."""
    head = "".join(f"<th class=text scope=col>{name}</th>" for name in runs[0])
    rows = []
    for number, run in enumerate(runs):
        first, *others = (html.escape(text) for text in run.values())
        cells = "".join(f"<td class=text>{text}</td>" for text in others)
        rows.append(f'<tr><td class=text><a href="{number}/">{first}</a></td>{cells}</tr>')
    name = html.escape(printable(folder.name or str(folder)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name} · pellucid</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{frame().style}</style></head><body><main id=main><section class=view><h1>{name}</h1>"
        f'<div class="card run-list"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></section></main></body></html>"
    )


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
