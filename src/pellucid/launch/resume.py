"""Brings the folder of a run that died, or was stopped, back to one consistent point.

    checkpoint   the newest one that is intact; the trainer goes on with its step
    next_batch   the first batch from there on that is missing or damaged; the orchestrator goes on with it

Files are cut back to those points, the books are settled, and what belongs to neither is deleted: batches
and exports of steps that a resumed run will sample and train anew, and policy versions beyond the checkpoint.
The trainer makes those again, and they may turn out otherwise (changed settings, another number of processes,
a GPU), so nobody may serve or evaluate the old ones. After that every process just goes on from the newest
thing it finds. Interrupted itself, it can be run again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from pellucid.checkpoint import Progress, newest_intact
from pellucid.config import (
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from pellucid.data.model_folder import check_safetensors
from pellucid.errors import ConfigError, ModelError
from pellucid.launch.console import make_console
from pellucid.launch.run_folder import claimed, has_begun, keep_logs, prepare
from pellucid.ledger import (
    LedgerEntry,
    Settlement,
    Stage,
    State,
    journals_of,
    read_journal,
    replace_entries,
    settle,
    sum_entries,
)
from pellucid.ledger.settings import Change, changed_settings
from pellucid.metrics import drop_metrics
from pellucid.orchestrator.records import cut_rollouts, discard_rollouts, saved_bytes
from pellucid.orchestrator.snapshot import Snapshot, newest_version, read_snapshot, write_snapshot
from pellucid.transport import retract_folder, retract_steps, step_folders
from pellucid.transport.filesystem import first_missing_batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    checkpoint: int
    next_batch: int
    num_lost: int = 0
    """Tokens that were sampled and are gone."""

    num_rolled_back: int = 0
    """Tokens that were trained in steps that are discarded."""

    def __str__(self) -> str:
        """`resuming at step 50; 7 batches are trained from disk first; 312 sampled tokens were lost`."""
        parts = [f"resuming at step {self.checkpoint}"]
        if replayed := self.next_batch - self.checkpoint:
            parts.append(
                f"{replayed} {'batches are' if replayed > 1 else 'batch is'} trained from disk first"
            )
        if self.num_lost:
            parts.append(f"{self.num_lost:,} sampled tokens were lost")
        if self.num_rolled_back:
            parts.append(f"{self.num_rolled_back:,} trained tokens are rolled back")
        return "; ".join(parts)


Config = TypeVar("Config", bound=RunConfig)


def take_over(
    config: Config, rewind: Callable[[Config, Sequence[Change]], ResumePoint], console: Console
) -> tuple[Config, int]:
    """The configuration of a run in its claimed folder, and the first step to train.

    `resume` is true from here on only if the folder holds a run; it is rewound then, and its logs are kept.
    Settings that a resumed run must not have are refused before any file of the run is touched.
    """
    changes = _changes(config) if has_begun(config.output_dir) else []
    config = config.model_copy(update={"resume": prepare(config)})
    if not config.resume:
        return config, 0
    point = rewind(config, changes)
    keep_logs(config.output_dir)
    console.out(str(point), highlight=False)
    for change in changes:
        since = point.next_batch if _shapes_batches(change.key) else point.checkpoint
        console.out(change.line(since), highlight=False)
    return config, point.checkpoint


def _changes(config: RunConfig) -> list[Change]:
    """Finds what a resumed run sets otherwise than before, each key once, though parts of it share some."""
    parts: dict[str, RunConfig] = {}
    if isinstance(config, RLConfig):
        _refuse_run_of(config, "sft")
        for name, kind in (("orchestrator", OrchestratorRunConfig), ("trainer", TrainerRunConfig)):
            parts[name] = config.part(kind)
    elif isinstance(config, SFTConfig):
        _refuse_run_of(config, "rl")
        parts["sft"] = config
    changes = [change for name, part in parts.items() for change in changed_settings(part, name)]
    return list({change.key: change for change in changes}.values())


def _refuse_run_of(config: RunConfig, command: str) -> None:
    if config.resume and (config.output_dir / "configs" / f"{command}.toml").exists():
        raise ConfigError(
            f"output_dir = {config.output_dir} holds a run of `pellucid {command}`, which another command "
            "cannot resume; choose another folder"
        )


def _shapes_batches(key: str) -> bool:
    """Whether a setting matters to the batches yet to be formed, not to those that are trained from disk."""
    return key.startswith(("orchestrator.", "inference.", "max_async_level"))


def _check_max_steps(config: RunConfig, num_done: int, what: str) -> None:
    max_steps = getattr(config, "max_steps", num_done)
    if max_steps < num_done:
        raise ConfigError(
            f"max_steps = {max_steps}, but the run in output_dir = {config.output_dir} has {what} "
            f"{num_done:,} steps already; set max_steps to {num_done} to end it there, or higher to go on"
        )


def run_rewind(config: RLConfig) -> None:
    """Only brings the folder back: for runs whose parts are started on their own."""
    with claimed(config.output_dir):
        config, _ = take_over(config.model_copy(update={"resume": True}), rewind_rl, make_console())
    if not config.resume:
        raise ConfigError(f"output_dir = {config.output_dir} holds no run that could be resumed")


def rewind_sft(config: RunConfig, changes: Sequence[Change] = ()) -> ResumePoint:
    progress = newest_intact(config.output_dir)
    checkpoint = progress.step if progress else 0
    _check_max_steps(config, checkpoint, "trained")
    drop_metrics(config.output_dir / "metrics" / "trainer.jsonl", checkpoint)
    return ResumePoint(checkpoint, checkpoint)


def rewind_rl(config: RunConfig, changes: Sequence[Change] = ()) -> ResumePoint:
    """Brings the folder back; `changes` are the settings that are others from here on."""
    folder = config.output_dir
    progress, snapshot = newest_intact(folder), read_snapshot(folder) or Snapshot()
    checkpoint = progress.step if progress else 0
    next_batch = first_missing_batch(folder, checkpoint, snapshot.batches_sent)
    _check_max_steps(config, next_batch, "sampled")
    # Groups that wait are given up as lost if they were judged by another rule, since a batch has one, its
    # step's in the record; or if they are newer than the next batch, since an earlier one was damaged.
    is_rejudged = any(change.key.startswith("orchestrator.advantage") for change in changes)
    kept = [group for group in snapshot.ready if not is_rejudged and newest_version(group) <= next_batch]
    snapshot = msgspec.structs.replace(snapshot, ready=kept)
    entries = _read_books(folder, snapshot)
    settlement = settle(
        entries,
        checkpoint=checkpoint,
        next_batch=next_batch,
        held={(config.run_name, env): tokens for env, tokens in snapshot.held().items()},
    )
    cut_rollouts(folder, snapshot.batches_sent, snapshot.rollouts_bytes)
    trained = {entry.step for entry in entries if entry.stage is Stage.TRAINER and entry.counts}
    discard_rollouts(folder, range(next_batch, snapshot.batches_sent), trained)
    for name in ("batches", "token_exports"):
        retract_steps(folder / name, next_batch)
    retract_steps(folder / "weights", checkpoint + 1)
    _discard_damaged_weights(folder / "weights")
    drop_metrics(folder / "metrics" / "trainer.jsonl", checkpoint)
    drop_metrics(folder / "metrics" / "orchestrator.jsonl", next_batch)
    drop_metrics(folder / "metrics" / "inference.jsonl", checkpoint)
    drop_metrics(folder / "metrics" / "eval.jsonl", checkpoint + 1)
    journal_bytes = _write_books(folder, entries, settlement, progress)
    # Last: only now would another resume cut the orchestrator's journal after what was settled here.
    write_snapshot(
        folder,
        msgspec.structs.replace(
            snapshot,
            batches_sent=next_batch,
            journal_bytes=journal_bytes,
            rollouts_bytes=saved_bytes(folder, next_batch),
        ),
    )
    return ResumePoint(
        checkpoint, next_batch, settlement.total(State.LOST), settlement.total(State.ROLLED_BACK)
    )


def _read_books(folder: Path, snapshot: Snapshot) -> list[LedgerEntry]:
    lengths = {Stage.ORCHESTRATOR: snapshot.journal_bytes}
    return [
        entry
        for stage in Stage
        for path in journals_of(folder / "ledger", stage)
        for entry in read_journal(path, lengths.get(stage))
    ]


def _write_books(
    folder: Path, entries: list[LedgerEntry], settlement: Settlement, progress: Progress | None
) -> int:
    """Returns the length of the orchestrator's journal."""
    trainer = settlement.trainer
    if progress is not None and not _agree(trainer, progress.ledger):
        logger.warning(
            "%s does not tell what the checkpoint of step %d knows; the checkpoint is believed",
            _journal(folder, Stage.TRAINER),
            progress.step,
        )
        trainer = progress.ledger
    # The first journal gets the books of all ranks: the next ones may be fewer, or more. The others go first,
    # so that nothing is ever counted twice; what is missing after an interruption, the checkpoint knows.
    first, *others = journals_of(folder / "ledger", Stage.TRAINER)
    for path in others:
        path.unlink()
    replace_entries(first, trainer)
    inference = _journal(folder, Stage.INFERENCE)
    replace_entries(inference, [*read_journal(inference), *settlement.inference])
    orchestrator = [entry for entry in entries if entry.stage is Stage.ORCHESTRATOR]
    path = _journal(folder, Stage.ORCHESTRATOR)
    replace_entries(path, [*orchestrator, *settlement.orchestrator])
    return path.stat().st_size


def _agree(entries: list[LedgerEntry], totals: list[LedgerEntry]) -> bool:
    def counts(entries: list[LedgerEntry]) -> dict[tuple[str, str], dict[str, int]]:
        return {(entry.run, entry.env): entry.counts for entry in sum_entries(entries)}

    return counts(entries) == counts(totals)


def _journal(folder: Path, stage: Stage) -> Path:
    return folder / "ledger" / f"{stage.value}.jsonl"


def _discard_damaged_weights(parent: Path) -> None:
    """Nobody could serve them; what the trainer does not find there, it publishes again."""
    for folder in step_folders(parent).values():
        try:
            for path in list(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
                check_safetensors(path)
        except ModelError as error:
            logger.warning("%s is given up: %s", folder, error)
            retract_folder(folder)
