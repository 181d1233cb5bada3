"""Do the books balance? Reads what each process counted and accounts for every sampled token.

While a process has not closed its journal, what it took in and has not yet handed on or settled is
`in_flight`. Once all have closed, a difference of one token is an error that names the stage. Between
orchestrator and trainer it names the step as well, and as soon as both are past it: what was sent up to a
step is what was received up to it, so that two mistakes of different steps cannot make up for each other.
What a process that was killed took along is lost, by what its `Links` tell.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from pellucid.errors import LedgerError
from pellucid.ledger.journal import (
    BESIDE,
    HANDS_ON,
    TAKES_IN,
    Flow,
    LedgerEntry,
    Stage,
    State,
    journals_of,
    read_journal,
)


def link_of(server: str, orchestrator: str) -> str:
    return f"{server}:{orchestrator}"


def orchestrator_of(link: str) -> str:
    return link.rpartition(":")[2]


class Links:
    """Tokens that a process took along when it died, by what passed between it and another.

    A link is a pair of processes, `SERVER:ORCHESTRATOR`. The engine counts what it sampled, delivered and
    gave up for it, the orchestrator what arrived. Both may be behind what they did, and either may be killed
    and started again while the other goes on, as another process and so on another link:

                         the engine is gone                   the orchestrator is gone
        sampled          what it had not delivered is lost    the engine gives it up, or delivers it to nobody
        delivered        what arrived was delivered, even     what did not arrive, or is in no books and not
                         if it was killed before it wrote     held for a coming batch, is lost
                         that down; what did not arrive
                         is lost

    So nobody has to settle the books of a process that died at the right moment: a late answer to an
    orchestrator that is gone is lost whenever it comes. On a link that both ends still serve, a difference is
    a difference.
    """

    def __init__(self) -> None:
        self._at_engine: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
        """Counts of the engine, by link, run and environment."""
        self._arrived: Counter[tuple[str, str, str]] = Counter()
        """Tokens in the books of the orchestrator, or held for a coming batch."""
        self._last_step: dict[tuple[str, str, str], int] = defaultdict(int)

    def add(self, entry: LedgerEntry) -> None:
        key = entry.link, entry.run, entry.env
        if not entry.link:
            return
        self._at_engine[key].update(entry.counts if entry.stage is Stage.INFERENCE else {})
        if entry.stage is not Stage.INFERENCE:
            self._arrived[key] += entry.counts.get(Flow.RECEIVED.value, 0) + entry.counts.get(
                Flow.HELD.value, 0
            )
            self._last_step[key] = max(self._last_step[key], entry.step)

    def losses(self, alive: Collection[str], *, is_over: bool) -> Iterator[LedgerEntry]:
        """Yields the entries that processes that died would still have written.

        `alive`: the processes that have journals open; `is_over`: the orchestrator has closed its own, so
        that what has not arrived from an engine that is gone never will.
        """
        for key, at_engine in sorted(self._at_engine.items()):
            link, run, env = key
            server, _, orchestrator = link.rpartition(":")
            engine_died = bool(server) and server not in alive
            orchestrator_died = bool(orchestrator) and orchestrator not in alive
            delivered, arrived = at_engine[Flow.DELIVERED.value], self._arrived[key]
            if orchestrator_died or (engine_died and is_over):
                gone = max(0, delivered - arrived)
                counts = {Flow.RECEIVED.value: gone, State.LOST.value: gone}
                yield LedgerEntry(Stage.ORCHESTRATOR, self._last_step[key], run, env, counts)
            if engine_died:
                unwritten = max(0, arrived - delivered)
                running = (
                    at_engine[Flow.SAMPLED.value] - delivered - unwritten - at_engine[State.CANCELLED.value]
                )
                counts = {
                    Flow.SAMPLED.value: max(0, -running),
                    Flow.DELIVERED.value: unwritten,
                    State.LOST.value: max(0, running),
                }
                yield LedgerEntry(Stage.INFERENCE, 0, run, env, counts)


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
    """Tokens that the trainer computed besides the states of sampled tokens, by flow."""

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
    paths = [path for stage in Stage for path in journals_of(ledger_dir, stage)]
    if not any(path.exists() and path.stat().st_size for path in paths):
        raise LedgerError(
            f"{ledger_dir} holds no ledger; give the folder of a run (the one with ledger/ in it)"
        )
    return reconcile_journals(map(read_journal, paths))


def reconcile_journals(journals: Iterable[Iterable[LedgerEntry]]) -> Report:
    """One journal per process; of a stage that runs in several, each has to be closed.

    Entries are read one at a time: what is kept grows with the steps of the run, not with its lines.
    """
    books: dict[Account, _Books] = defaultdict(_Books)
    report = Report({}, {}, {}, [], [], {stage: Counter() for stage in Stage})
    links = Links()
    ends: list[_JournalEnd] = []
    for journal in journals:
        end = _JournalEnd()
        for entry in journal:
            end.note(entry)
            links.add(entry)
            _book(entry, books, report)
        ends.append(end)
    is_closed = {stage: [end.is_closed for end in ends if end.stage is stage] for stage in Stage}
    report.running.extend(stage for stage, closed in is_closed.items() if not closed or not all(closed))
    is_over = Stage.ORCHESTRATOR not in report.running
    for entry in links.losses({end.opened for end in ends}, is_over=is_over):
        _book(entry, books, report)
    past = _steps_past(ends, report.running)
    for account, counted in sorted(books.items()):
        _settle(account, counted, past, report)
    return report


@dataclass(slots=True)
class _JournalEnd:
    """The end of a journal: whether it is closed, who wrote last, and up to which step."""

    stage: Stage | None = None
    is_closed: bool = False
    opened: str = ""
    """The last process that wrote to the journal."""

    last_step: int | None = None
    booked: set[int] = field(default_factory=set)
    """Steps that the trainer has booked."""

    def note(self, entry: LedgerEntry) -> None:
        self.stage, self.is_closed = entry.stage, entry.closed
        self.opened = entry.opened or self.opened
        if entry.counts:
            self.last_step = max(entry.step, entry.step if self.last_step is None else self.last_step)
            if entry.stage is Stage.TRAINER:
                self.booked.add(entry.step)


_STATES = frozenset(state.value for state in State)


class _Books:
    """The counts of all stages for one account."""

    def __init__(self) -> None:
        self.totals: dict[Stage, Counter[str]] = {stage: Counter() for stage in Stage}
        self.unsettled: dict[Stage, Counter[int]] = {Stage.ORCHESTRATOR: Counter(), Stage.TRAINER: Counter()}
        """Tokens by step that the stage took in and neither settled nor handed on; never 0."""
        self.on_the_way: Counter[int] = Counter()
        """Tokens by step that were sent to the trainer, minus those that it received; never 0."""


def _book(entry: LedgerEntry, books: Mapping[Account, _Books], report: Report) -> None:
    """Adds an entry to the books of its account, and the states of its tokens to those of its step."""
    if not entry.counts:
        return
    account, stage, step = books[entry.run, entry.env], entry.stage, entry.step
    account.totals[stage].update(entry.counts)
    if stage is not Stage.INFERENCE:
        states = report.steps.setdefault(step, Counter())
        states.update({what: tokens for what, tokens in entry.counts.items() if what in _STATES})
        _change(account.unsettled[stage], step, unsettled(stage, entry.counts))
        if stage is Stage.ORCHESTRATOR:
            _change(account.on_the_way, step, entry.counts.get(Flow.SENT.value, 0))
        else:
            _change(account.on_the_way, step, -entry.counts.get(Flow.RECEIVED.value, 0))


def _change(tokens: dict[int, int], step: int, by: int) -> None:
    if by and (changed := tokens.pop(step, 0) + by):
        tokens[step] = changed


def unsettled(stage: Stage, counts: Mapping[str, int]) -> int:
    """Returns the tokens that the stage took in and neither settled in a state nor handed on."""
    settled = sum(tokens for what, tokens in counts.items() if what in _STATES)
    handed_on = counts.get(HANDS_ON[stage].value, 0) if stage in HANDS_ON else 0
    return counts.get(TAKES_IN[stage].value, 0) - settled - handed_on


def _settle(account: Account, books: _Books, past: Sequence[int], report: Report) -> None:
    """Enters the states of an account into the report, and each gap as a difference or as in flight."""
    inference, orchestrator, trainer = (books.totals[stage] for stage in Stage)
    states: Counter[str] = Counter()
    for stage, total in books.totals.items():
        report.stages[stage].update(total)
        states.update({what: tokens for what, tokens in total.items() if what in _STATES})

    def compare(where: str, tokens: int, sender: Stage, receiver: Stage) -> None:
        # A surplus is legitimate while its sender may still have to write down that it sent it.
        if (receiver if tokens > 0 else sender) in report.running:
            states[State.IN_FLIGHT.value] += tokens
        else:
            refuse(where, tokens)

    def refuse(where: str, tokens: int) -> None:
        if tokens:
            report.differences.append(Difference(account, where, tokens))

    compare("inference", unsettled(Stage.INFERENCE, inference), Stage.INFERENCE, Stage.INFERENCE)
    undelivered = inference[Flow.DELIVERED.value] - orchestrator[Flow.RECEIVED.value]
    compare("inference to orchestrator", undelivered, Stage.INFERENCE, Stage.ORCHESTRATOR)
    held = orchestrator[Flow.HELD.value]
    if held < 0 or Stage.ORCHESTRATOR not in report.running:  # nothing waits for a batch any more
        refuse("orchestrator, held over a resume", held)
    for stage, by_step in books.unsettled.items():
        for step, tokens in sorted(by_step.items()):
            compare(f"{stage.value}, step {step}", tokens, stage, stage)
    # Both stages are past these steps, so that what is missing up to one of them can no longer arrive.
    steps, known = sorted(books.on_the_way), 0
    sums = list(accumulate((books.on_the_way[step] for step in steps), initial=0))
    for step in past:
        gap = sums[bisect_right(steps, step)]
        refuse(f"orchestrator to trainer, step {step}", gap - known)
        known = gap
    unreceived = orchestrator[Flow.SENT.value] - trainer[Flow.RECEIVED.value] - known
    compare("orchestrator to trainer", unreceived, Stage.ORCHESTRATOR, Stage.TRAINER)
    beside = Counter({flow.value: trainer[flow.value] for flow in BESIDE})
    packed_states = (State.TRAINED, State.MASKED, State.SKIPPED, State.UNTRAINABLE)
    packed = sum(trainer[state.value] for state in packed_states) + beside["context"] + beside["padding"]
    refuse("trainer, computed tokens", beside["computed"] + beside["saved"] - packed)
    report.states[account] = +states
    report.sampled[account] = inference[Flow.SAMPLED.value]
    report.beside[account] = +beside


def _steps_past(ends: Sequence[_JournalEnd], running: Sequence[Stage]) -> list[int]:
    """Steps that the trainer booked, as far as neither it nor the orchestrator will write more about them.

    They begin a step only after all processes of the trainer have booked the one before. What a checkpoint
    knew of earlier steps may be one entry: then only the last of them is among these.
    """
    last_steps = [
        end.last_step
        for end in ends
        if end.last_step is not None and end.stage is not Stage.INFERENCE and end.stage in running
    ]
    past = min(last_steps, default=math.inf)
    return sorted(step for step in {step for end in ends for step in end.booked} if step < past)
