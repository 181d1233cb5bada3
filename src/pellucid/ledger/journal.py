"""The counts of each process: states that a sampled token can end in, flows between stages, the journal.

    inference:     sampled  = delivered + cancelled                      (+ in_flight)
    orchestrator:  received = eval + … + rejected + sent                 (+ in_flight)
    trainer:       received = rejected + truncated + untrainable + skipped + masked + trained

Each arrow between two stages is a check: delivered = received, sent = received. Summed up, every token
that the engine sampled is in exactly one state.

The journal of one process is JSONL, each line the change since the last one:

    {"stage":"trainer","step":3,"run":"demo","env":"reverse-text","counts":{"received":812,"trained":810,"masked":2}}

A line is written whole or not at all; `close` appends a line that says the process ended in good order,
so that a reader can tell "still running or killed" from "done". Lines that are not counts:

    {"stage":"inference","opened":"5d0c…"}      this process writes from here on; earlier ones are gone
    {"stage":"orchestrator","step":7,"mark":8}  all that snapshot 8 of the orchestrator knows is above

What passes from engine to orchestrator is counted per `link`, the pair of processes that it passed between,
so that a reader knows which tokens a process that is gone took along; see `reconcile.Links`.

A journal grows with the steps of a run, never with its duration: now and then its lines are summed up, per
step where steps matter, and the file is replaced. A reader that has it open goes on with what it was.

A run that is resumed settles its journals first; each part settles its own, and may be interrupted and do so
again. The trainer goes on at the step of a checkpoint, the orchestrator after the last batch that exists:

    step            0 ... 49   50 ... 56   57        checkpoint = 50, next_batch = 57
    batches         covered    on disk     missing
    trainer         kept       replayed    -
    orchestrator    kept       kept        discarded

- The trainer forgets the steps from the checkpoint on: it trains them again and books them then.
- A discarded batch was sent, but will never train: `rolled_back` if it had been trained, else `lost`.
- An engine has nothing to settle. What it, or an orchestrator, took along follows from the `reconcile.Links`.
"""

import logging
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec

from pellucid.data.files import append_whole, read_lines, replace_file, require_file, require_own, sync
from pellucid.errors import LedgerError

logger = logging.getLogger(__name__)


class Stage(StrEnum):
    INFERENCE = "inference"
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"


class State(StrEnum):
    """In order of precedence: the first that fits is the token's state."""

    meaning: str
    """Why the tokens in this state are there, for a person."""

    def __new__(cls, value: str, meaning: str = "") -> "State":
        state = str.__new__(cls, value)
        state._value_, state.meaning = value, meaning
        return state

    EVAL = "eval", "sampled to evaluate, not to train"
    LOST = "lost", "a process died and took them along"
    CANCELLED = "cancelled", "given up while they were sampled"
    FAILED_ROLLOUT = "failed_rollout", "the environment raised or timed out"
    DROPPED_GROUP = "dropped_group", "too little of their group was left"
    STALE = "stale", "sampled too many policy versions ago"
    FILTERED = "filtered", "refused by a filter of yours"
    ZERO_ADVANTAGE = "zero_advantage", "an advantage of 0: nothing to learn from"
    REJECTED = "rejected", "broke a rule of training samples"
    TRUNCATED = "truncated", "beyond seq_len"
    UNTRAINABLE = "untrainable", "masked out by the environment, or in another branch"
    SKIPPED = "skipped", "in a step whose loss or gradient was not finite"
    MASKED = "masked", "outside of the trust region"
    TRAINED = "trained", "their gradient is in the weights"
    ROLLED_BACK = "rolled_back", "trained in a step that a resume discarded"
    IN_FLIGHT = "in_flight", "running, waiting, or on the way"


class Flow(StrEnum):
    """Tokens that a stage takes in, hands on or computes; never a final state."""

    SAMPLED = "sampled"
    DELIVERED = "delivered"
    RECEIVED = "received"
    HELD = "held"
    """Received by an earlier process of the orchestrator and kept for a coming batch; booked when it goes."""
    SENT = "sent"
    CONTEXT = "context"
    """Prompt and tool tokens computed by the trainer, beside the sampled ones."""
    PADDING = "padding"
    COMPUTED = "computed"
    """All tokens of the trainer's forward passes."""
    SAVED = "saved"
    """Tokens of a shared prompt that another sequence computed."""


TAKES_IN = {Stage.INFERENCE: Flow.SAMPLED, Stage.ORCHESTRATOR: Flow.RECEIVED, Stage.TRAINER: Flow.RECEIVED}
BESIDE = (Flow.CONTEXT, Flow.PADDING, Flow.COMPUTED, Flow.SAVED)
"""Beside the states; computed + saved = trained + masked + skipped + untrainable + context + padding."""

HANDS_ON = {Stage.INFERENCE: Flow.DELIVERED, Stage.ORCHESTRATOR: Flow.SENT}


NOBODY = "nobody"
"""Process name in a journal that a resume has settled, until a process opens it again."""

_TAIL_BYTES = 1 << 16
_OPEN_STEPS = 64

Tokens = Annotated[int, msgspec.Meta(ge=-(1 << 48), le=1 << 48)]
"""A number of tokens that a run could have; sums of them fit into what JSON's readers take."""


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    stage: Stage
    step: int = 0
    run: str = ""
    env: str = ""
    counts: dict[str, Tokens] = {}
    closed: bool = False
    link: str = ""
    """`SERVER:ORCHESTRATOR`, the processes that the tokens passed between; "" where it is unknown."""

    opened: str = ""
    """The process that writes from here on."""

    mark: int = 0
    """Number of the orchestrator's snapshot that knows what is above."""


_Key = tuple[str, str, str]
"""(run, environment, link)."""


class Journal:
    """Counts tokens in memory and appends them to the stage's file at `flush`.

    The process that opens it has a name of its own, `process`, new at every start.
    """

    def __init__(
        self,
        path: Path,
        stage: Stage,
        *,
        resume: bool = False,
        process: str = "",
        sum_up_bytes: int = 1 << 18,
    ) -> None:
        """`sum_up_bytes`: what the journal may grow by before its lines are summed up."""
        path.parent.mkdir(parents=True, exist_ok=True)
        require_own(path)
        try:
            path.touch(exist_ok=resume)
        except FileExistsError:
            raise LedgerError(
                f"{path} is the ledger of an earlier run; use another output_dir, or clear or resume this one"
            ) from None
        self.process = process or new_process()
        self._path = path
        self._stage = stage
        self._pending: dict[_Key, Counter[str]] = {}
        self._sum_up_bytes = sum_up_bytes
        self._sum_up_at = sum_up_bytes
        last = mend(path)
        if stage is not Stage.TRAINER:
            append_entries(path, [LedgerEntry(stage, opened=self.process)])
        elif last is not None and last.closed:
            append_entries(path, [LedgerEntry(stage)])  # open again

    def count(self, run: str, env: str, what: State | Flow, tokens: int, link: str = "") -> None:
        if tokens:
            self._pending.setdefault((run, env, link), Counter())[what.value] += int(tokens)

    def totals(self) -> list[LedgerEntry]:
        """Sums up what is written so far, one entry per run and environment."""
        return sum_entries(read_journal(self._path))

    def flush(self, step: int) -> None:
        entries = [
            LedgerEntry(self._stage, step, run, env, dict(counts), link=link)
            for (run, env, link), counts in self._pending.items()
        ]
        append_entries(self._path, entries)
        self._pending.clear()
        if self._stage is Stage.INFERENCE:
            self._sum_up()

    def mark(self, number: int, step: int) -> None:
        """Appends a mark, and returns once it and all entries before it are on the disk.

        A later summing-up never merges entries across the marks that a resume may go back to.
        """
        append_entries(self._path, [LedgerEntry(self._stage, step, mark=number)])
        sync(self._path)
        # The snapshot of this mark is yet to be written: a resume may have to go back to the one before last.
        if number > 2:
            self._sum_up(number - 2)

    def sync(self) -> None:
        """Returns once what is written would survive a power failure."""
        sync(self._path)

    def close(self, step: int) -> None:
        self.flush(step)
        append_entries(self._path, [LedgerEntry(self._stage, step, closed=True)])

    def _sum_up(self, mark: int = 0) -> None:
        """Sums up the file once it has doubled since the last time, so that each byte is rewritten rarely."""
        if self._path.stat().st_size >= self._sum_up_at:
            replace_file(self._path, _summed_up(self._path, self._stage, mark), durable=True)
            self._sum_up_at = 2 * self._path.stat().st_size + self._sum_up_bytes


def new_process() -> str:
    return uuid.uuid4().hex[:12]


def journals_of(ledger_dir: Path, stage: Stage) -> list[Path]:
    """`inference.jsonl`, `inference_1.jsonl`, …: one per process of the stage; the first even if missing."""
    first = ledger_dir / f"{stage.value}.jsonl"
    return [first, *sorted(ledger_dir.glob(f"{stage.value}_*.jsonl"))]


def sum_entries(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Returns one entry per stage, run and environment, with the last step of any."""
    totals: dict[tuple[Stage, str, str], Counter[str]] = {}
    last_step = 0
    for entry in entries:
        last_step = max(last_step, entry.step)
        if entry.counts:
            totals.setdefault((entry.stage, entry.run, entry.env), Counter()).update(entry.counts)
    return [
        LedgerEntry(stage, last_step, run, env, dict(counts))
        for (stage, run, env), counts in sorted(totals.items())
    ]


def append_entries(path: Path, entries: Sequence[LedgerEntry]) -> None:
    if entries:
        require_own(path)
        with path.open("ab", buffering=0) as file:
            append_whole(file, b"".join(map(_encode, entries)))


def _encode(entry: LedgerEntry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def read_journal(path: Path) -> Iterator[LedgerEntry]:
    """Yields the entries of a journal; a torn last line (the process was killed meanwhile) is left out."""
    return (entry for entry, _ in _read(path))


def _read(path: Path) -> Iterator[tuple[LedgerEntry, int]]:
    """Yields entries, each with the byte where it ends."""
    end = 0
    for number, line in read_lines(path):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield _decode(line, f"{path}:{number}"), end


def _decode(line: bytes, place: str) -> LedgerEntry:
    try:
        return msgspec.json.decode(line, type=LedgerEntry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LedgerError(f"{place} is not a ledger entry: {error}; copy the file again") from error


def end_of_mark(path: Path, mark: int) -> int | None:
    """Returns where the journal stood at snapshot `mark`, in bytes; 0 for mark 0; None if it lacks it."""
    if mark == 0:
        return 0
    return next((end for entry, end in _read(path) if entry.mark == mark), None)


def mend(path: Path) -> LedgerEntry | None:
    """Cuts off a torn last line, so that the next one is not glued to it; returns the last whole one."""
    require_file(path)
    if not path.exists():
        return None
    with path.open("r+b", buffering=0) as file:
        start = size = file.seek(0, os.SEEK_END)
        tail = b""
        while tail.count(b"\n") < 2 and start > 0:
            start = max(0, start - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(size - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        if whole != tail:
            require_own(path)
            file.truncate(start + len(whole))
    return _decode(whole.splitlines()[-1], f"the last line of {path}") if whole else None


def _summed_up(path: Path, stage: Stage, mark: int) -> Iterator[bytes]:
    """Yields the journal with the same sums in fewer lines; from `mark` on, if any, the lines as they are."""
    entries, opened = read_journal(path), ""
    unchanged: list[LedgerEntry] = []
    open_steps: dict[int, dict[_Key, Counter[str]]] = {}
    """The latest ones: memory is bounded, and steps of evaluations and of batches alternate."""
    for entry in entries:
        opened = entry.opened or opened
        if mark and entry.mark >= mark:
            unchanged = [entry]
            break
        if entry.counts:
            step = entry.step if stage is not Stage.INFERENCE else 0  # an engine knows of no steps
            counts = open_steps.setdefault(step, {})
            counts.setdefault((entry.run, entry.env, entry.link), Counter()).update(entry.counts)
            if len(open_steps) > _OPEN_STEPS:
                first = next(iter(open_steps))
                yield from _step_lines(stage, first, open_steps.pop(first))
    for step, counts in open_steps.items():
        yield from _step_lines(stage, step, counts)
    if opened:
        yield _encode(LedgerEntry(stage, opened=opened))
    yield from map(_encode, chain(unchanged, entries))


def _step_lines(stage: Stage, step: int, counts: dict[_Key, Counter[str]]) -> Iterator[bytes]:
    for (run, env, link), tokens in counts.items():
        yield _encode(LedgerEntry(stage, step, run, env, dict(tokens), link=link))


def settle_trainer(ledger_dir: Path, checkpoint: int, known: Sequence[LedgerEntry] | None) -> None:
    """Leaves the steps before the checkpoint in the journals of the trainer.

    `known`: what the checkpoint knows of them, summed up; None if there is none. It is believed where the
    journals tell otherwise. The first journal gets the books of all ranks: the next may be fewer, or more.
    """
    first, *others = journals_of(ledger_dir, Stage.TRAINER)
    if not ledger_dir.exists():
        return

    def kept() -> Iterator[LedgerEntry]:
        for path in (first, *others):
            for entry in read_journal(path):
                if entry.step < checkpoint and not entry.closed:
                    yield entry

    entries = kept()
    if known is not None and _counts(kept()) != _counts(known):
        logger.warning(
            "%s differs from what the checkpoint of step %d knows; the checkpoint is believed",
            first,
            checkpoint,
        )
        entries = iter(known)
    # Entry by entry: they may come from the file that is replaced.
    replace_file(first, map(_encode, entries), durable=True)
    # Killed before this, they would be counted twice; the checkpoint knows better the next time.
    for path in others:
        path.unlink()


def _counts(entries: Iterable[LedgerEntry]) -> dict[tuple[str, str], dict[str, int]]:
    return {(entry.run, entry.env): entry.counts for entry in sum_entries(entries)}


def trained_steps(ledger_dir: Path, start: int) -> set[int]:
    """Steps from `start` on that the trainer has booked."""
    return {
        entry.step
        for path in journals_of(ledger_dir, Stage.TRAINER)
        for entry in read_journal(path)
        if entry.counts and entry.step >= start
    }


def lost_as(step: int, trained: Collection[int]) -> str:
    """Returns the state of tokens whose batch a resume discarded."""
    return (State.ROLLED_BACK if step in trained else State.LOST).value


def discarded(entries: Iterable[LedgerEntry], next_batch: int, trained: Collection[int]) -> list[LedgerEntry]:
    """Returns the entries that take back the orchestrator's batches from `next_batch` on."""
    sent: Counter[tuple[int, str, str]] = Counter()
    for entry in entries:
        if entry.step >= next_batch:
            sent[entry.step, entry.run, entry.env] += entry.counts.get(Flow.SENT.value, 0)
    return [
        LedgerEntry(
            Stage.ORCHESTRATOR, step, run, env, {Flow.SENT.value: -tokens, lost_as(step, trained): tokens}
        )
        for (step, run, env), tokens in sorted(sent.items())
        if tokens
    ]


def held_again(
    entries: Iterable[LedgerEntry], held: Counter[tuple[str, str, str]], step: int
) -> list[LedgerEntry]:
    """Returns entries that bring the journal's held tokens to `held`, by run, environment and link."""
    missing = Counter(held)
    for entry in entries:
        if tokens := entry.counts.get(Flow.HELD.value, 0):
            missing[entry.run, entry.env, entry.link] -= tokens
    return [
        LedgerEntry(Stage.ORCHESTRATOR, step, run, env, {Flow.HELD.value: tokens}, link=link)
        for (run, env, link), tokens in sorted(missing.items())
        if tokens
    ]


def settle_engines(ledger_dir: Path) -> None:
    """Closes the journals of the engines, which are all gone; one that comes back opens its own again."""
    for path in journals_of(ledger_dir, Stage.INFERENCE):
        last = mend(path)
        if last is not None and last.opened != NOBODY:
            append_entries(path, [LedgerEntry(Stage.INFERENCE, opened=NOBODY, closed=True)])
