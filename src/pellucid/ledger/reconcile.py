"""Do the books balance? Reads what each process counted and accounts for every sampled token.

While a process has not closed its journal, what it took in and has not yet handed on or settled is
`in_flight`. Once all have closed, a difference of one token is an error that names the stage.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pellucid.errors import LedgerError
from pellucid.ledger.journal import LedgerEntry, journals_of, read_journal
from pellucid.ledger.states import BESIDE, HANDS_ON, TAKES_IN, Flow, Stage, State

Account = tuple[str, str]
"""(run, environment)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens that a stage, or the way between two stages, does not account for; negative: counted twice."""

    account: Account
    where: str
    tokens: int

    def __str__(self) -> str:
        run, env = self.account
        fault = "missing" if self.tokens > 0 else "counted twice"
        amount = f"{abs(self.tokens):,} token{'s' if abs(self.tokens) != 1 else ''}"
        return f"{self.where}: {amount} {fault} (run {run!r}, environment {env!r})"


@dataclass(frozen=True)
class Report:
    states: dict[Account, Counter[str]]
    """Final states per account, `in_flight` included while the run goes on."""

    sampled: dict[Account, int]
    beside: dict[Account, Counter[str]]
    """What the trainer computed, beside the states of sampled tokens."""

    differences: list[Difference]
    running: list[Stage]
    """Stages whose journal is not closed."""

    @property
    def balanced(self) -> bool:
        return not self.differences

    def verdict(self) -> list[str]:
        """One line if the books balance, else one per difference; then the journals that are not closed."""
        lines = [str(difference) for difference in self.differences]
        if self.balanced:
            sampled = sum(self.sampled.values())
            lines = [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
        if self.running:
            names = ", ".join(stage.value for stage in self.running)
            lines.append(
                f"not closed: {names} (still running, stopped or killed; a resume goes on with them)"
            )
        return lines


def reconcile(ledger_dir: Path) -> Report:
    journals = [list(read_journal(path)) for stage in Stage for path in journals_of(ledger_dir, stage)]
    if not any(journals):
        raise LedgerError(
            f"{ledger_dir} holds no ledger; give the folder of a run (the one with ledger/ in it)"
        )
    return reconcile_journals(journals)


def reconcile_journals(journals: Sequence[Sequence[LedgerEntry]]) -> Report:
    """One journal per process; of a stage that runs in several, each has to be closed."""
    counts: dict[Account, dict[Stage, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    closed: dict[Stage, bool] = {}
    for journal in journals:
        for entry in journal:
            if entry.counts:
                counts[entry.run, entry.env][entry.stage].update(entry.counts)
        if journal:
            closed[journal[-1].stage] = closed.get(journal[-1].stage, True) and journal[-1].closed
    running = [stage for stage in Stage if not closed.get(stage, False)]
    report = Report({}, {}, {}, [], running)
    for account, stages in sorted(counts.items()):
        _settle(account, stages, report)
    return report


def _settle(account: Account, stages: dict[Stage, Counter[str]], report: Report) -> None:
    states: Counter[str] = Counter()
    for stage in Stage:
        for state in State:
            states[state.value] += stages[stage][state.value]
    for where, tokens, sender, receiver in _gaps(stages):
        # A surplus is legitimate while its sender may still have to write down that it sent it.
        if (receiver if tokens > 0 else sender) in report.running:
            states[State.IN_FLIGHT.value] += tokens
        elif tokens:
            report.differences.append(Difference(account, where, tokens))
    trainer = stages[Stage.TRAINER]
    beside = Counter({flow.value: trainer[flow.value] for flow in BESIDE})
    accounted = sum(trainer[state.value] for state in (State.TRAINED, State.MASKED, State.UNTRAINABLE))
    packed = accounted + beside["context"] + beside["padding"]
    if (gap := beside["computed"] + beside["saved"] - packed) != 0:
        report.differences.append(Difference(account, "trainer, computed tokens", gap))
    report.states[account] = +states
    report.sampled[account] = stages[Stage.INFERENCE][Flow.SAMPLED.value]
    report.beside[account] = +beside


def _gaps(stages: dict[Stage, Counter[str]]) -> list[tuple[str, int, Stage, Stage]]:
    """(where, tokens unaccounted for, the stage that had them, the stage that may still settle them)."""
    gaps = []
    for stage in Stage:
        taken = stages[stage][TAKES_IN[stage].value]
        settled = sum(stages[stage][state.value] for state in State)
        handed_on = stages[stage][HANDS_ON[stage].value] if stage in HANDS_ON else 0
        gaps.append((stage.value, taken - settled - handed_on, stage, stage))
    for sender, receiver in pairwise(Stage):
        gap = stages[sender][HANDS_ON[sender].value] - stages[receiver][TAKES_IN[receiver].value]
        gaps.append((f"{sender.value} to {receiver.value}", gap, sender, receiver))
    return gaps
