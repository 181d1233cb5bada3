"""Takes the orchestrator's part of a run folder back to where its snapshot was, whoever else goes on.

    next_batch   the first batch from the newest checkpoint on that is missing or damaged: sampled next

Journal, saved rollouts and batches are cut back to that point; see `ledger.settle` and `ledger.Links` for
what becomes of the tokens. The snapshot is written last: interrupted before, all of it can be done again.
Where the newest snapshot or the journal is damaged, neither journal nor rollouts are cut, and groups that
waited for a batch are given up: they may have been sent since.

A trainer may be training from `batches/` at this very moment. A batch that it has taken is good enough for
it, and those that its checkpoint covers may go at any time; those after the first that is missing it never
touches.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pellucid.config import OrchestratorRunConfig, RunConfig, TrainerRunConfig
from pellucid.data.files import require_own, sync
from pellucid.errors import ConfigError
from pellucid.ledger import (
    NOBODY,
    LedgerEntry,
    Stage,
    append_entries,
    discarded,
    end_of_mark,
    held_again,
    mend,
    read_journal,
    trained_steps,
)
from pellucid.ledger.settings import Change
from pellucid.orchestrator.records import cut_rollouts, discard_rollouts, saved_bytes
from pellucid.orchestrator.snapshot import (
    HeldRollout,
    Snapshot,
    newest_version,
    read_snapshot,
    write_snapshot,
)
from pellucid.transport import Limits, limits_of, retract_steps, stable_steps
from pellucid.transport.spool import Spool, first_missing_batch

logger = logging.getLogger(__name__)


def settle_orchestrator(
    config: TrainerRunConfig | OrchestratorRunConfig,
    changes: Sequence[Change] = (),
    *,
    checkpoint: int | None = None,
) -> Snapshot:
    """Returns the snapshot to go on from; `changes` are the settings that are others from here on.

    `checkpoint`: where the trainer, which is gone, will go on; None: it may be running, and the caller is the
    orchestrator that goes on.
    """
    folder = config.output_dir
    journal = folder / "ledger" / "orchestrator.jsonl"
    snapshot = read_snapshot(folder) or Snapshot(generation=0 if journal.exists() else -1)
    next_batch = _next_batch(folder, snapshot, checkpoint, limits_of(config.transport))
    check_max_steps(config, next_batch, "sampled")
    require_own(journal)
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.touch()
    mend(journal)
    trained = trained_steps(journal.parent, next_batch)
    end = None if snapshot.is_fallback else end_of_mark(journal, snapshot.mark)
    if end is not None:
        os.truncate(journal, end)
        cut_rollouts(folder, snapshot.batches_sent, snapshot.rollouts_bytes)
    elif not snapshot.is_fallback:
        logger.warning("%s lacks what was written before snapshot %d; is it damaged?", journal, snapshot.mark)
    given_up = discarded(read_journal(journal), next_batch, trained)
    discard_rollouts(folder, {entry.step for entry in given_up}, trained)
    retract_steps(folder / "batches", next_batch)
    Spool(folder).forget_refusals()
    snapshot = msgspec.structs.replace(
        snapshot,
        ready=[] if end is None else _kept(snapshot, next_batch, changes),
        batches_sent=next_batch,
        mark=1 + max((entry.mark for entry in read_journal(journal)), default=0),
        rollouts_bytes=saved_bytes(folder, next_batch),
    )
    held = Counter({(config.run_name, env, link): n for (env, link), n in snapshot.held().items() if link})
    append_entries(
        journal,
        [
            *given_up,
            *held_again(read_journal(journal), held, next_batch),
            LedgerEntry(Stage.ORCHESTRATOR, next_batch, opened=NOBODY),
            LedgerEntry(Stage.ORCHESTRATOR, next_batch, mark=snapshot.mark),
        ],
    )
    sync(journal)
    # Names of groups are unique for good, also those of a process that dies before its first snapshot.
    generation = snapshot.generation + (checkpoint is None)
    write_snapshot(folder, msgspec.structs.replace(snapshot, generation=generation))
    return snapshot


def _next_batch(folder: Path, snapshot: Snapshot, checkpoint: int | None, limits: Limits) -> int:
    stop = None if snapshot.is_fallback else snapshot.batches_sent
    if checkpoint is not None:
        return first_missing_batch(folder, checkpoint, stop, limits)
    while True:
        start = max(stable_steps(folder / "checkpoints"), default=0)
        missing = first_missing_batch(folder, start, stop, limits, trust_taken=True)
        # A trainer that goes on may have saved a checkpoint meanwhile, and let go of batches that it covers.
        if start == max(stable_steps(folder / "checkpoints"), default=0):
            return missing


def _kept(snapshot: Snapshot, next_batch: int, changes: Sequence[Change]) -> list[list[HeldRollout]]:
    """Groups that may go on waiting for a batch; the others are given up as lost.

    Those that were judged by another rule are: a batch has one, its step's in the record. So are those that
    are newer than the next batch, since an earlier one was damaged.
    """
    is_rejudged = any(change.key.startswith("orchestrator.advantage") for change in changes)
    return [group for group in snapshot.ready if not is_rejudged and newest_version(group) <= next_batch]


def check_max_steps(config: RunConfig, num_done: int, what: str) -> None:
    """Raises ConfigError if the run in the folder has done more than it is asked for."""
    max_steps = getattr(config, "max_steps", num_done)
    if max_steps < num_done:
        raise ConfigError(
            f"max_steps = {max_steps}, but the run in output_dir = {config.output_dir} has {what} "
            f"{num_done:,} steps already; set max_steps to {num_done} to end it there, or higher to go on"
        )
