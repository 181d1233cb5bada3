"""`checkpoints/orchestrator.bin`: where an orchestrator stood after its last batch, and how it resumes.

It is on the disk *before* that batch is handed over. Whatever happens in between, a resume finds a snapshot
that knows of every batch; a batch that it knows and cannot find was lost.

    CRC-32 of the rest, 4 bytes, little-endian     MessagePack of a `Snapshot`

The one before is kept as `orchestrator.before.bin`: a damaged one is noticed by its checksum and passed over.

A resume takes the orchestrator's part of a run folder back to where the snapshot was, whoever else goes on:

    next_batch   the first batch from the newest checkpoint on that is missing or damaged: sampled next.
                 Where batches go over a network, the trainer says which one it has not stored

Journal, saved rollouts and batches are cut back to that point; `ledger.journal` and `ledger.reconcile` say
what becomes of the tokens. Rollouts that were ready for the next batch are in the snapshot, whole. The new
snapshot is written last: interrupted before, all of it can be done again. Where the newest snapshot or the
journal is damaged, neither journal nor rollouts are cut, and groups that waited for a batch are given up:
they may have been sent since.

A trainer may be training from `batches/` at this very moment. A batch that it has taken is good enough for
it, and those that its checkpoint covers may go at any time; those after the first that is missing it never
touches.
"""

import logging
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from pellucid.config import OrchestratorRunConfig, RunConfig, TrainerRunConfig
from pellucid.data import Example, PackedArray, RoleSpan, Rollout, TrainingSample, Turn, TurnTrace
from pellucid.data.files import replace_file, require_file, require_own, sync
from pellucid.data.images import read_image_shape, without_pixels
from pellucid.errors import ConfigError, DataError
from pellucid.ledger import Flow, LedgerEntry, Stage, State, journal, read_journal
from pellucid.ledger.settings import Change
from pellucid.orchestrator.records import cut_rollouts, discard_rollouts, saved_bytes
from pellucid.orchestrator.scheduler import SchedulerState
from pellucid.orchestrator.verdict import Outcome, Verdict
from pellucid.transport import Limits, limits_of, retract_steps, stable_steps
from pellucid.transport.spool import Spool, first_missing_batch

log = logging.getLogger(__name__)

_FILE = Path("checkpoints") / "orchestrator.bin"
_FILE_BEFORE = Path("checkpoints") / "orchestrator.before.bin"
_CHECKSUM_BYTES = 4


class HeldTurn(msgspec.Struct, frozen=True, array_like=True):
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    policy_versions: list[tuple[int, int]]
    role_spans: list[RoleSpan] = []
    """Those of a rollout's last turn; other turns have the beginnings of these, and none here."""

    link: str = ""
    trainable: bool = True
    trace: TurnTrace = msgspec.field(default_factory=TurnTrace)
    sample: int | None = None


class HeldRollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict in a snapshot, without `Example.info`: only the reward reads it; it may not serialize. The
    pixels of its images are in its samples alone."""

    rollout_id: str
    group_id: str
    env_name: str
    example_id: str
    messages: list[dict[str, Any]]
    temperature: float
    turns: list[HeldTurn]
    outcome: str
    reason: str = ""
    advantage: float | None = None
    samples: list[tuple[dict[str, PackedArray], dict[str, Any]]] = []
    """Arrays and values of each sample."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    weights: dict[str, float] = {}
    time_s: float = 0.0
    error: str | None = None
    error_type: str | None = None
    state: dict[str, str] = {}

    @classmethod
    def of(cls, verdict: Verdict) -> "HeldRollout":
        rollout = verdict.rollout
        turns = [HeldTurn(**{name: getattr(turn, name) for name in _OF_TURN}) for turn in rollout.turns]
        if turns:
            turns[-1] = msgspec.structs.replace(turns[-1], role_spans=rollout.turns[-1].role_spans)
        return cls(
            **{name: getattr(rollout, name) for name in _OF_ROLLOUT},
            example_id=rollout.example.example_id,
            messages=without_pixels(rollout.example.messages),
            turns=turns,
            outcome=verdict.outcome.value,
            reason=verdict.reason,
            advantage=verdict.advantage,
            samples=[(dict(sample.arrays), dict(sample.values)) for sample in verdict.samples],
        )

    def verdict(self, run_id: str) -> Verdict:
        rollout = Rollout(
            **{name: getattr(self, name) for name in _OF_ROLLOUT},
            example=Example(self.example_id, self.messages),
            turns=[Turn.without_tokens(**msgspec.structs.asdict(turn)) for turn in self.turns],
        )
        outcome: Outcome = Flow.SENT if self.outcome == Flow.SENT.value else State(self.outcome)
        samples = [
            TrainingSample.from_packed(arrays, {**values, "run_id": run_id})
            for arrays, values in self.samples
        ]
        return Verdict(rollout, outcome, self.reason, self.advantage, samples)


_OF_TURN = [name for name in HeldTurn.__struct_fields__ if name != "role_spans"]
_OF_ROLLOUT = [each.name for each in fields(Rollout) if each.name in HeldRollout.__struct_fields__]
_OF_ROLLOUT.remove("turns")


class Snapshot(SchedulerState, frozen=True):
    """The state that a resumed run continues from; without arguments, that of a run that has not begun."""

    ready: list[list[HeldRollout]] = msgspec.field(default_factory=list)
    mark: int = 0
    """Number of the snapshot; the journal has an entry with the same number where the snapshot was taken."""

    rollouts_bytes: dict[int, int] = msgspec.field(default_factory=dict)
    """Lengths of the saved rollouts of step `batches_sent` and later ones; see `records.saved_bytes`."""

    is_fallback: bool = False
    """Whether a newer snapshot was damaged: journal and batches may contain more than this one knows."""

    def held(self) -> Counter[tuple[str, str]]:
        """Counts tokens that wait for a batch, by environment and link; they are not booked yet."""
        held: Counter[tuple[str, str]] = Counter()
        for each in (each for group in self.ready for each in group):
            for turn in each.turns:
                held[each.env_name, turn.link] += turn.num_tokens
        return held

    def scheduler_state(self, run_id: str) -> SchedulerState:
        """Returns the state with verdicts in place of held rollouts."""
        ready: list[Any] = [[each.verdict(run_id) for each in group] for group in self.ready]
        return msgspec.structs.replace(self, ready=ready)


def take_snapshot(state: SchedulerState, *, mark: int, rollouts_bytes: dict[int, int]) -> Snapshot:
    values = {name: getattr(state, name) for name in SchedulerState.__struct_fields__}
    values["ready"] = [[HeldRollout.of(verdict) for verdict in verdicts] for verdicts in state.ready]
    return Snapshot(**values, mark=mark, rollouts_bytes=rollouts_bytes)


def write_snapshot(run_dir: Path, snapshot: Snapshot) -> None:
    """Returns once it is on the disk; the last one is kept, unless it is known to be damaged."""
    payload = msgspec.msgpack.encode(msgspec.structs.replace(snapshot, is_fallback=False))
    replace_file(
        run_dir / _FILE,
        zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little") + payload,
        durable=True,
        keep_as=None if snapshot.is_fallback else run_dir / _FILE_BEFORE,
    )


def read_snapshot(run_dir: Path) -> Snapshot | None:
    """Returns the newest that is intact; None if the run sent no batch yet.

    Raises DataError if there are some, and none is intact.
    """
    first_error: DataError | None = None
    for path in (run_dir / _FILE, run_dir / _FILE_BEFORE):
        if path.exists():
            try:
                snapshot = _decode(path)
            except DataError as error:
                first_error = first_error or error
                continue
            if first_error is not None:
                log.warning("%s; the one before is taken", first_error)
            return msgspec.structs.replace(snapshot, is_fallback=first_error is not None)
    if first_error is not None:
        raise DataError(
            f"{first_error}, and there is none before it, so the run cannot be resumed; its newest weights "
            "and checkpoint are intact: start another run from them"
        )
    return None


def _decode(path: Path) -> Snapshot:
    require_file(path)
    content = path.read_bytes()
    checksum, payload = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if zlib.crc32(payload) != int.from_bytes(checksum, "little"):
        raise DataError(f"{path} is damaged: its checksum is not what was written")
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is of another version of pellucid, or damaged: {error}") from error


def has_trainers_part(folder: Path) -> bool:
    """Returns whether the trainer of the run works in this folder, and not in one elsewhere."""
    parts = (folder / "batches", *journal.journals_of(folder / "ledger", Stage.TRAINER))
    return any(path.exists() for path in parts)


def settle_orchestrator(
    config: TrainerRunConfig | OrchestratorRunConfig,
    changes: Sequence[Change] = (),
    *,
    checkpoint: int | None = None,
    missing: int | None = None,
) -> Snapshot:
    """Returns the snapshot to go on from; `changes` are the settings that are others from here on.

    `checkpoint`: where the trainer, which is gone, will go on; None: it may be running, and the caller is the
    orchestrator that goes on. `missing`: the first step whose batch a trainer elsewhere has not stored; None
    if batches are in the run folder.
    """
    folder = config.output_dir
    path = folder / "ledger" / "orchestrator.jsonl"
    snapshot = read_snapshot(folder) or Snapshot(generation=0 if path.exists() else -1)
    if missing is None:
        limits = limits_of(config.transport, images=read_image_shape(config.model.name))
        next_batch = _next_batch(folder, snapshot, checkpoint, limits)
    else:
        next_batch = missing if snapshot.is_fallback else min(missing, snapshot.batches_sent)
    check_max_steps(config, next_batch, "sampled")
    require_own(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    journal.mend(path)
    trained = journal.trained_steps(path.parent, next_batch)
    end = None if snapshot.is_fallback else journal.end_of_mark(path, snapshot.mark)
    if end is not None:
        os.truncate(path, end)
        cut_rollouts(folder, snapshot.batches_sent, snapshot.rollouts_bytes)
    elif not snapshot.is_fallback:
        log.warning("%s lacks what was written before snapshot %d; is it damaged?", path, snapshot.mark)
    given_up = journal.discarded(read_journal(path), next_batch, trained)
    discard_rollouts(folder, {entry.step for entry in given_up}, trained)
    retract_steps(folder / "batches", next_batch)
    Spool(folder).forget_refusals()
    snapshot = msgspec.structs.replace(
        snapshot,
        ready=[] if end is None else _kept(snapshot, next_batch, changes),
        batches_sent=next_batch,
        mark=1 + max((entry.mark for entry in read_journal(path)), default=0),
        rollouts_bytes=saved_bytes(folder, next_batch),
    )
    held = Counter({(config.run_name, env, link): n for (env, link), n in snapshot.held().items() if link})
    entries = [
        *given_up,
        *journal.held_again(read_journal(path), held, next_batch),
        LedgerEntry(Stage.ORCHESTRATOR, next_batch, opened=journal.NOBODY),
        LedgerEntry(Stage.ORCHESTRATOR, next_batch, mark=snapshot.mark),
    ]
    journal.append_entries(path, entries)
    sync(path)
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
    if any(change.key.startswith("orchestrator.advantage") for change in changes):
        return []

    def is_newer(held: HeldRollout) -> bool:
        return any(version > next_batch for turn in held.turns for version, _ in turn.policy_versions)

    return [group for group in snapshot.ready if not any(map(is_newer, group))]


def check_max_steps(config: RunConfig, num_done: int, what: str) -> None:
    """Raises ConfigError if the run in the folder has done more than it is asked for."""
    max_steps = getattr(config, "max_steps", num_done)
    if max_steps < num_done:
        raise ConfigError(
            f"max_steps = {max_steps}, but the run in output_dir = {config.output_dir} has {what} "
            f"{num_done:,} steps already; set max_steps to {num_done} to end it there, or higher to go on"
        )
