"""Settles the books of a run that died or was stopped: each part settles its own before it continues.

The trainer goes on at the step of a checkpoint, the orchestrator after the last batch that still exists;
either may have died alone:

    step            0 ... 49   50 ... 56   57        checkpoint = 50, next_batch = 57
    batches         covered    on disk     missing
    trainer         kept       replayed    -
    orchestrator    kept       kept        discarded

- The trainer forgets the steps from the checkpoint on: it trains them again and books them then.
- A discarded batch was sent, but will never train: `rolled_back` if it had been trained, else `lost`.
- An engine has nothing to settle. What it, or an orchestrator, took along follows from the `reconcile.Links`.

Each of these may be interrupted and run again.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pellucid.ledger.journal import (
    NOBODY,
    Flow,
    LedgerEntry,
    Stage,
    State,
    append_entries,
    journals_of,
    mend,
    read_journal,
    replace_entries,
    sum_entries,
)

logger = logging.getLogger(__name__)


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

    if known is not None and _counts(kept()) != _counts(known):
        logger.warning(
            "%s does not tell what the checkpoint of step %d knows; the checkpoint is believed",
            first,
            checkpoint,
        )
        replace_entries(first, known)
    else:
        replace_entries(first, kept())
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


def discarded(entries: Iterable[LedgerEntry], next_batch: int, trained: Collection[int]) -> list[LedgerEntry]:
    """Returns the entries that take back the orchestrator's batches from `next_batch` on."""
    sent: Counter[tuple[int, str, str]] = Counter()
    for entry in entries:
        if entry.step >= next_batch:
            sent[entry.step, entry.run, entry.env] += entry.counts.get(Flow.SENT.value, 0)
    return [
        LedgerEntry(
            Stage.ORCHESTRATOR,
            step,
            run,
            env,
            {
                Flow.SENT.value: -tokens,
                (State.ROLLED_BACK if step in trained else State.LOST).value: tokens,
            },
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
