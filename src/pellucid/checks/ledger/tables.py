"""The states of all tokens in a table: by environment and run, or step by step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from pellucid.data.alarms import Alarm
from pellucid.ledger import BESIDE, Report, State
from pellucid.orchestrator.failures import BiasFinding

TALLIES_PER_TABLE = 4


@dataclass(frozen=True, slots=True)
class Tally:
    """The tokens of one environment of one run, or of all of them together."""

    run: str
    env: str
    sampled: int
    states: Counter[str]
    beside: Counter[str]

    @property
    def title(self) -> str:
        return f"{self.env or '-'}\n{self.run}"

    def share(self, state: State) -> str:
        return f"{self.states[state.value] / self.sampled:.1%}" if self.sampled else "-"


def tallies(report: Report, by: str) -> list[Tally]:
    """One per run and environment, or one per run."""
    parts = [
        Tally(run, env, report.sampled[run, env], states, report.beside[run, env])
        for (run, env), states in report.states.items()
    ]
    if by != "run":
        return parts
    runs = {part.run: [other for other in parts if other.run == part.run] for part in parts}
    return [replace(total(own), run=run) for run, own in runs.items()]


def total(parts: Sequence[Tally]) -> Tally:
    return Tally(
        run="",
        env="all",
        sampled=sum(part.sampled for part in parts),
        states=sum((part.states for part in parts), Counter()),
        beside=sum((part.beside for part in parts), Counter()),
    )


def print_tallies(parts: Sequence[Tally], console: Console) -> None:
    columns = [*parts, total(parts)]
    for start in range(0, len(columns), TALLIES_PER_TABLE):
        console.print(_table(columns[start : start + TALLIES_PER_TABLE], shown=_states(columns[-1])))


def print_steps(report: Report, console: Console) -> None:
    """A line per step; tokens that the engine gave up are of no step."""
    shown = [state for state in State if any(counts[state.value] for counts in report.steps.values())]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for title in ("step", *(state.value.replace("_", "\n") for state in shown), "all"):
        table.add_column(title, justify="right", vertical="bottom")
    for step, counts in sorted(report.steps.items()):
        cells = [counts[state.value] for state in shown]
        table.add_row(str(step), *(f"{tokens:,}" for tokens in (*cells, sum(cells))))
    console.print(table)


def _states(everything: Tally) -> list[State]:
    return [state for state in State if everything.states[state.value]]


def _table(columns: Sequence[Tally], shown: Sequence[State]) -> Table:
    table = Table("tokens", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right", overflow="fold")
    for state in shown:
        table.add_row(
            state.value, *(_cell(column.states[state.value], column.share(state)) for column in columns)
        )
    table.add_section()
    table.add_row("sampled", *(_cell(column.sampled) for column in columns), style="bold")
    table.add_section()
    for flow in BESIDE:
        table.add_row(flow.value, *(_cell(column.beside[flow.value]) for column in columns), style="dim")
    return table


def _cell(tokens: int, share: str = "") -> str:
    """Only states have a share: context and padding are not sampled, but computed beside what is."""
    return f"{tokens:,} {share:>6}"


def as_json(
    report: Report, by: str, findings: Sequence[BiasFinding], alarms: Sequence[Alarm]
) -> dict[str, Any]:
    parts = tallies(report, by)
    found: dict[str, Any] = {
        "balanced": report.balanced,
        "running": report.running,
        "all": _numbers(total(parts)),
        "accounts": [{"run": part.run, "env": part.env, **_numbers(part)} for part in parts],
        "stages": {stage.value: dict(counts) for stage, counts in report.stages.items()},
        "differences": [
            {"run": run, "env": env, "where": difference.where, "tokens": difference.tokens}
            for difference in report.differences
            for run, env in [difference.account]
        ],
        "bias": [asdict(finding) for finding in findings],
        "alarms": [msgspec.to_builtins(alarm) for alarm in alarms],
    }
    if by == "step":
        found["steps"] = [
            {"step": step, "states": _counted(counts)} for step, counts in sorted(report.steps.items())
        ]
    return found


def _numbers(tally: Tally) -> dict[str, Any]:
    return {"sampled": tally.sampled, "states": _counted(tally.states), "beside": dict(tally.beside)}


def _counted(counts: Counter[str]) -> dict[str, int]:
    """States in their order, those that no token is in left out."""
    return {state.value: counts[state.value] for state in State if counts[state.value]}
