"""What a resume has to write into the books, so that they balance again once the run is over. Pure.

A run died, or was stopped. Its trainer goes on at the step of a checkpoint, its orchestrator after the last
batch that still exists:

    step            0 ... 49   50 ... 56   57        checkpoint = 50, next_batch = 57
    batches         covered    on disk     missing
    trainer         kept       replayed    -
    orchestrator    kept       kept        discarded

- The trainer forgets the steps from the checkpoint on: it trains them again and books them then.
- A discarded batch was sent, but will never train: `rolled_back` if it had been trained, else `lost`.
- What the engine delivered and nobody holds any more is `lost`; so is what it had sampled but not delivered.
- An engine that was killed may not have written down its last tokens. That they arrived is evidence that
  they were sampled and delivered.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pellucid.ledger.journal import LedgerEntry
from pellucid.ledger.reconcile import Account
from pellucid.ledger.states import Flow, Stage, State


@dataclass(frozen=True, slots=True)
class Settlement:
    trainer: list[LedgerEntry]
    """The whole journal of the trainer."""

    orchestrator: list[LedgerEntry]
    """To be appended to its journal."""

    inference: list[LedgerEntry]
    """To be appended to its journal."""

    def total(self, state: State) -> int:
        return sum(entry.counts.get(state.value, 0) for entry in (*self.orchestrator, *self.inference))


def settle(
    entries: Sequence[LedgerEntry],
    *,
    checkpoint: int,
    next_batch: int,
    held: Mapping[Account, int],
) -> Settlement:
    """`held`: tokens that the orchestrator received and keeps for a coming batch, not yet in its journal."""
    trainer = [entry for entry in entries if entry.stage is Stage.TRAINER and not entry.closed]
    trained_steps = {entry.step for entry in trainer}
    discarded = _discarded(entries, next_batch, trained_steps)
    lost, at_engine = _lost(entries, next_batch, held)
    return Settlement(
        trainer=[entry for entry in trainer if entry.step < checkpoint],
        orchestrator=[*discarded, *lost],
        inference=at_engine,
    )


def _discarded(entries: Sequence[LedgerEntry], next_batch: int, trained_steps: set[int]) -> list[LedgerEntry]:
    sent: Counter[tuple[int, str, str]] = Counter()
    for entry in entries:
        if entry.stage is Stage.ORCHESTRATOR and entry.step >= next_batch:
            sent[entry.step, entry.run, entry.env] += entry.counts.get(Flow.SENT.value, 0)
    return [
        LedgerEntry(
            Stage.ORCHESTRATOR,
            step,
            run,
            env,
            {
                Flow.SENT.value: -tokens,
                (State.ROLLED_BACK if step in trained_steps else State.LOST).value: tokens,
            },
        )
        for (step, run, env), tokens in sorted(sent.items())
        if tokens
    ]


def _lost(
    entries: Sequence[LedgerEntry], next_batch: int, held: Mapping[Account, int]
) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
    """What the orchestrator and the engine have to add for tokens that are gone."""
    at_engine, received = _totals(entries, Stage.INFERENCE), _totals(entries, Stage.ORCHESTRATOR)
    last_version = max((entry.step for entry in entries if entry.stage is Stage.INFERENCE), default=0)
    orchestrator, inference = [], []
    for account in sorted({*at_engine, *received, *held}):
        counts = at_engine[account]
        arrived = received[account][Flow.RECEIVED.value] + held.get(account, 0)
        unwritten = max(0, arrived - counts[Flow.DELIVERED.value])
        gone = max(0, counts[Flow.DELIVERED.value] - arrived)
        ended = sum(counts[what.value] for what in (Flow.DELIVERED, State.CANCELLED, State.LOST)) + unwritten
        running = counts[Flow.SAMPLED.value] - ended
        orchestrator.append(_entry(Stage.ORCHESTRATOR, next_batch, account, received=gone, lost=gone))
        inference.append(
            _entry(
                Stage.INFERENCE,
                last_version,
                account,
                sampled=max(0, -running),
                delivered=unwritten,
                lost=max(0, running),
            )
        )
    return [entry for entry in orchestrator if entry.counts], [entry for entry in inference if entry.counts]


def _totals(entries: Sequence[LedgerEntry], stage: Stage) -> dict[Account, Counter[str]]:
    totals: dict[Account, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        if entry.stage is stage and entry.counts:
            totals[entry.run, entry.env].update(entry.counts)
    return totals


def _entry(stage: Stage, step: int, account: Account, **counts: int) -> LedgerEntry:
    run, env = account
    return LedgerEntry(stage, step, run, env, {what: tokens for what, tokens in counts.items() if tokens})
