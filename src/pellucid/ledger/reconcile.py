"""Do the books balance? Reads what each process counted and accounts for every sampled token.

While a process has not closed its journal, what it took in and has not yet handed on or settled is
`in_flight`. Once all have closed, a difference of one token is an error that names the stage. Between
orchestrator and trainer it names the step as well, and as soon as both are past it: what was sent up to a
step is what was received up to it, so that two mistakes of different steps cannot make up for each other.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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

    stages: dict[Stage, Counter[str]] = field(default_factory=dict)
    """All that a stage counted, of all accounts together."""

    steps: dict[int, Counter[str]] = field(default_factory=dict)
    """States of the tokens that were settled with the batch of each step; not those of the engine, which
    knows of no steps."""

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
    books: dict[Account, _Books] = defaultdict(_Books)
    closed: dict[Stage, bool] = {}
    for journal in journals:
        for entry in journal:
            if entry.counts:
                books[entry.run, entry.env].add(entry)
        if journal:
            closed[journal[-1].stage] = closed.get(journal[-1].stage, True) and journal[-1].closed
    running = [stage for stage in Stage if not closed.get(stage, False)]
    report = Report({}, {}, {}, [], running, {stage: Counter() for stage in Stage})
    past = _steps_past(journals, running)
    for account, own in sorted(books.items()):
        _settle(account, own, past, report)
    return report


class _Books:
    """What the stages counted of one account, step by step."""

    def __init__(self) -> None:
        self._counts: dict[Stage, dict[int, Counter[str]]] = {stage: defaultdict(Counter) for stage in Stage}

    def add(self, entry: LedgerEntry) -> None:
        self._counts[entry.stage][entry.step].update(entry.counts)

    def steps(self, stage: Stage) -> dict[int, Counter[str]]:
        return dict(sorted(self._counts[stage].items()))

    def total(self, stage: Stage) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in self._counts[stage].values():
            total.update(counts)  # not `+`, which drops what is negative
        return total

    def on_the_way(self, past: Sequence[int]) -> Iterator[int]:
        """Sent to the trainer and not received, up to each of these steps, which ascend."""
        changes = Counter[int]()
        for step, counts in self._counts[Stage.ORCHESTRATOR].items():
            changes[step] += counts[Flow.SENT.value]
        for step, counts in self._counts[Stage.TRAINER].items():
            changes[step] -= counts[Flow.RECEIVED.value]
        waiting = deque(sorted(changes.items()))
        gap = 0
        for step in past:
            while waiting and waiting[0][0] <= step:
                gap += waiting.popleft()[1]
            yield gap

    def unsettled(self, stage: Stage, counts: Counter[str]) -> int:
        """Of what the stage took in: neither in a state nor handed on."""
        settled = sum(counts[state.value] for state in State)
        handed_on = counts[HANDS_ON[stage].value] if stage in HANDS_ON else 0
        return counts[TAKES_IN[stage].value] - settled - handed_on


class _Gap(NamedTuple):
    where: str
    tokens: int
    sender: Stage
    """Had them."""

    receiver: Stage
    """May still settle them."""

    is_final: bool = False
    """Both are past it."""


def _settle(account: Account, books: _Books, past: Sequence[int], report: Report) -> None:
    states: Counter[str] = Counter()
    for stage in Stage:
        report.stages[stage].update(books.total(stage))
        for step, counts in books.steps(stage).items():
            found = Counter({state.value: counts[state.value] for state in State if counts[state.value]})
            states.update(found)
            if stage is not Stage.INFERENCE:
                report.steps.setdefault(step, Counter()).update(found)
    for gap in _gaps(books, past):
        # A surplus is legitimate while its sender may still have to write down that it sent it.
        waits = (gap.receiver if gap.tokens > 0 else gap.sender) in report.running
        if waits and not gap.is_final:
            states[State.IN_FLIGHT.value] += gap.tokens
        elif gap.tokens:
            report.differences.append(Difference(account, gap.where, gap.tokens))
    trainer = books.total(Stage.TRAINER)
    beside = Counter({flow.value: trainer[flow.value] for flow in BESIDE})
    packed_states = (State.TRAINED, State.MASKED, State.SKIPPED, State.UNTRAINABLE)
    packed = sum(trainer[state.value] for state in packed_states) + beside["context"] + beside["padding"]
    if unpacked := beside["computed"] + beside["saved"] - packed:
        report.differences.append(Difference(account, "trainer, computed tokens", unpacked))
    report.states[account] = +states
    report.sampled[account] = books.total(Stage.INFERENCE)[Flow.SAMPLED.value]
    report.beside[account] = +beside


def _gaps(books: _Books, past: Sequence[int]) -> Iterator[_Gap]:
    inference, orchestrator, trainer = Stage
    yield _Gap(inference.value, books.unsettled(inference, books.total(inference)), inference, inference)
    delivered = books.total(inference)[Flow.DELIVERED.value]
    received = books.total(orchestrator)[Flow.RECEIVED.value]
    yield _Gap("inference to orchestrator", delivered - received, inference, orchestrator)
    for stage in (orchestrator, trainer):
        for step, counts in books.steps(stage).items():
            yield _Gap(f"{stage.value}, step {step}", books.unsettled(stage, counts), stage, stage)
    known = 0
    for step, gap in zip(past, books.on_the_way(past), strict=True):
        if gap != known:
            yield _Gap(f"orchestrator to trainer, step {step}", gap - known, orchestrator, trainer, True)
            known = gap
    sent, taken = books.total(orchestrator)[Flow.SENT.value], books.total(trainer)[Flow.RECEIVED.value]
    yield _Gap("orchestrator to trainer", sent - taken - known, orchestrator, trainer)


def _steps_past(journals: Sequence[Sequence[LedgerEntry]], running: Sequence[Stage]) -> list[int]:
    """Steps that the trainer booked, as far as neither it nor the orchestrator will write more about them.

    They begin a step only after all processes of the trainer have booked the one before. What a checkpoint
    knew of earlier steps may be one entry: then only the last of them is among these.
    """
    booked, past = set(), math.inf
    for journal in journals:
        steps = [entry.step for entry in journal if entry.counts]
        if steps and journal[0].stage is Stage.TRAINER:
            booked |= set(steps)
        if steps and journal[0].stage is not Stage.INFERENCE and journal[0].stage in running:
            past = min(past, max(steps))
    return sorted(step for step in booked if step < past)
