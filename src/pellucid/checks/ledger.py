"""`pellucid ledger RUN`: where every sampled token went, and whether any is missing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from pellucid.config.tools import LedgerSettings
from pellucid.ledger import BESIDE, Report, State, reconcile

WIDTH = 100
TALLIES_PER_TABLE = 4


def run_ledger(settings: LedgerSettings) -> int:
    """0 if every sampled token is accounted for, 1 if one is missing."""
    report = reconcile(settings.run / "ledger")
    if settings.as_json:
        print(orjson.dumps(as_json(report)).decode())
    else:
        print_report(report, Console(width=WIDTH))
    return 0 if report.balanced else 1


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


def tallies(report: Report) -> list[Tally]:
    return [
        Tally(run, env, report.sampled[run, env], states, report.beside[run, env])
        for (run, env), states in report.states.items()
    ]


def total(parts: Sequence[Tally]) -> Tally:
    return Tally(
        run="",
        env="all",
        sampled=sum(part.sampled for part in parts),
        states=sum((part.states for part in parts), Counter()),
        beside=sum((part.beside for part in parts), Counter()),
    )


def print_report(report: Report, console: Console) -> None:
    parts = tallies(report)
    columns = [*parts, total(parts)]
    for start in range(0, len(columns), TALLIES_PER_TABLE):
        console.print(_table(columns[start : start + TALLIES_PER_TABLE], shown=_states(columns[-1])))
    for line in report.verdict():
        console.out(line, highlight=False)


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


def as_json(report: Report) -> dict[str, Any]:
    parts = tallies(report)
    return {
        "balanced": report.balanced,
        "running": report.running,
        "all": _numbers(total(parts)),
        "accounts": [{"run": part.run, "env": part.env, **_numbers(part)} for part in parts],
        "differences": [
            {"run": run, "env": env, "where": difference.where, "tokens": difference.tokens}
            for difference in report.differences
            for run, env in [difference.account]
        ],
    }


def _numbers(tally: Tally) -> dict[str, Any]:
    states = {state.value: tally.states[state.value] for state in State if tally.states[state.value]}
    return {"sampled": tally.sampled, "states": states, "beside": dict(tally.beside)}
