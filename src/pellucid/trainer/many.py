"""`pellucid trainer` with `trainer.many_runs`: trains the runs that join, in turns, until they are done.

    round    the main process looks which runs joined, left or have a new batch, and shares that with all
             every run with samples trains its share of the token budget: gradients go to its adapter
             a run whose batch is used up finishes its step: optimizer, weights, books, metrics

A run divides by the denominator of its own batch, so that its gradient does not depend on the other runs. An
error of one run evicts that run alone, with the reason.

Runs find the trainer, and join it, in `runs/NAME/` below its folder:

    run.toml + STABLE     a run that wants to be trained, with its own configuration
    alive                 locked by the run's process as long as it lives
    LEAVE                 the run wants to go, after a checkpoint
    OUTCOME               how it ended, written by the trainer: done, left, evicted or stopped, and why

The run writes all but `OUTCOME`, and deletes the folder once it has read that; if the run died, the trainer
deletes it. The trainer keeps a lock on `.serving` as long as it lives.
"""

import logging
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

from pellucid.config import TrainerRunConfig
from pellucid.config.base import to_toml
from pellucid.data import TokenTable
from pellucid.data.files import open_lock, read_whole, replace_file, try_lock
from pellucid.data.model_folder import everywhere
from pellucid.ending import DISK_SILENCE_S, say
from pellucid.errors import ConfigError, DataError, PayloadError, PellucidError, ProcessError
from pellucid.export.paths import ExportPaths
from pellucid.trainer.batches import (
    NoBatches,
    OrchestratorBatches,
    Stopped,
    StopRequest,
    open_batches,
)
from pellucid.trainer.build import build_run, load_trained, open_journal
from pellucid.trainer.loop import accumulate
from pellucid.trainer.observer import LogSink, StepObserver
from pellucid.trainer.optimizer import TrainedWeights
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run, say_finishing
from pellucid.trainer.step import StepBatch
from pellucid.transport import Batch, BatchReceiver, is_stable, publish_folder

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_JOIN_POLL_S = 0.05
_REMIND_S = 30.0
_MAX_OUTCOME_BYTES = 1 << 20


def serve_runs(config: TrainerRunConfig, ranks: Ranks) -> None:
    settings = config.trainer.many_runs
    assert settings is not None
    roster, stop = Roster(config.output_dir), StopRequest()
    with ExitStack() as stack:
        if ranks.is_main:
            stack.enter_context(roster.serving())
        adapters = load_trained(config, ranks, num_runs=settings.max_runs)
        runs = ManyRuns(config, settings.stay, adapters, roster, ranks, stop)
        logger.info("up to %d runs can join in %s", settings.max_runs, config.output_dir)
        stack.enter_context(stop.listening(runs.say_stopping))
        try:
            train_many(runs)
        except Stopped as stopped:
            logger.warning("%s: stopping after checkpoints", stopped)
            for name in list(runs.members):
                reason = f"the trainer in {config.output_dir} was stopped ({stopped})"
                runs.leave(name, RunOutcome.STOPPED, reason)
            raise SystemExit(128 + stopped.signal) from None


def train_many(runs: "ManyRuns") -> None:
    for turns in runs.rounds():
        for member, num_samples in turns:
            with runs.evicting(member):
                is_last = member.train(num_samples)
            if member.name in runs.members and is_last:
                with runs.evicting(member, everywhere=True):
                    member.finish_step()


def take_turns(waiting: Mapping[str, Sequence[int]], budget: int, *, first: int = 0) -> dict[str, int]:
    """Counts how many of each run's next samples a round takes, given their lengths; at least one in all.

        waiting  a: 5 5 5 5    b: 3 3 3    budget 16
        round 1  a: 5 5        b: 3 3          16 tokens: the next sample is of the run with fewest tokens
        round 2  a: 5 5        b: 3

    The run with fewest tokens is never above its share. So with k runs none gets more than budget ÷ k tokens
    plus one sample. Once a run has no more samples, the others use the rest of its share. `first` is the
    index of the run that is preferred among those with equally many tokens.
    """
    names = list(waiting)
    order = [names[(first + index) % len(names)] for index in range(len(names))] if names else []
    taken = dict.fromkeys(order, 0)
    num_tokens = dict.fromkeys(order, 0)
    while open_runs := [name for name in order if taken[name] < len(waiting[name])]:
        name = min(open_runs, key=num_tokens.__getitem__)
        length = waiting[name][taken[name]]
        total = sum(num_tokens.values())
        if total and total + length > budget:
            break
        taken[name] += 1
        num_tokens[name] += length
    return {name: count for name, count in taken.items() if count}


class RunOutcome(Enum):
    DONE = "done"
    LEFT = "left"
    EVICTED = "evicted"
    STOPPED = "stopped"


class Roster:
    def __init__(self, trainer_dir: Path) -> None:
        self._folder = trainer_dir
        self._runs = trainer_dir / "runs"

    # The trainer's side.

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Locks the folder for this trainer; raises ConfigError if another trainer holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open_lock(self._folder / ".serving") as lock:
            if not try_lock(lock):
                raise ConfigError(
                    f"output_dir = {self._folder} is in use by a trainer that is still going on; choose "
                    "another folder, or stop that trainer first"
                )
            yield

    def waiting(self) -> list[str]:
        """Names the runs that want to be trained, sorted."""
        return [
            name
            for name in self._names()
            if not (self._runs / name / "OUTCOME").exists() and not self.is_leaving(name)
        ]

    def is_leaving(self, name: str) -> bool:
        """Returns whether the run asked to leave, or its process is gone."""
        folder = self._runs / name
        return (folder / "LEAVE").exists() or not _is_locked(folder / "alive")

    def config_path(self, name: str) -> Path:
        return self._runs / name / "run.toml"

    def say(self, name: str, outcome: RunOutcome, reason: str = "") -> None:
        """Writes how a run ended; deletes its folder instead if the run's process is gone."""
        folder = self._runs / name
        with suppress(FileNotFoundError):
            if _is_locked(folder / "alive"):
                replace_file(folder / "OUTCOME", f"{outcome.value}\n{reason}".encode())
            else:
                shutil.rmtree(folder)

    def sweep(self) -> None:
        """Deletes the folders of runs whose process has died."""
        for name in self._names():
            if not _is_locked(self._runs / name / "alive"):
                shutil.rmtree(self._runs / name, ignore_errors=True)

    # The run's side.

    @contextmanager
    def joined(self, name: str, config: str) -> Iterator[None]:
        """Keeps a run on the roster inside the `with`; raises ConfigError if a living run has its name."""
        folder = self._runs / name
        if _is_locked(folder / "alive"):
            raise ConfigError(
                f"a run {name!r} is being trained by {self._folder}; choose another run_id or output_dir"
            )
        locks: list[IO[str]] = []

        def write(partial: Path) -> None:
            locks.append((partial / "alive").open("a"))
            try_lock(locks[0])
            (partial / "run.toml").write_text(config, encoding="utf-8")

        publish_folder(folder, write)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            locks[0].close()

    def leave(self, name: str) -> None:
        (self._runs / name / "LEAVE").touch()

    def has_trainer(self) -> bool:
        return _is_locked(self._folder / ".serving")

    def outcome(self, name: str) -> tuple[RunOutcome, str] | None:
        """Reads how the run ended, and why; None if the trainer has not written it yet."""
        path = self._runs / name / "OUTCOME"
        try:
            outcome, _, reason = read_whole(path, _MAX_OUTCOME_BYTES).decode(errors="replace").partition("\n")
            return RunOutcome(outcome), reason
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} does not say what became of the run: {error}") from error

    def _names(self) -> list[str]:
        return sorted(folder.name for folder in self._runs.glob("[!.]*") if is_stable(folder))


def _is_locked(path: Path) -> bool:
    """Returns whether a living process holds a lock on the file; False for anything but a file."""
    if not path.is_file():
        return False
    try:
        with path.open("r+") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


@dataclass
class Member:
    """One of the runs that share a model: the batch that it trains, and how much of it is trained."""

    name: str
    run: Run
    step: int = 0
    """Index of the step that is being trained, or whose batch is awaited."""

    batch: StepBatch | None = None
    observer: StepObserver | None = None
    num_taken: int = 0
    num_micro_batches: int = 0

    def __post_init__(self) -> None:
        self._waiting = ExitStack()

    def begin(self, config: TrainerRunConfig) -> None:
        """Begins or resumes the run, which waits for its first batch from then on."""
        self.run.begin(config)
        self.step = self.run.start
        self._wait()

    def _wait(self) -> None:
        self._waiting.enter_context(self.run.timed("wait", self.step))

    @property
    def waiting(self) -> Sequence[int]:
        """Lengths of the samples of its batch that are still to be trained."""
        return [] if self.batch is None else self.batch.table.lengths[self.num_taken :].tolist()

    def receive(self, table: TokenTable) -> None:
        self.batch = self.run.pack(self.step, table)
        self.observer = self.run.observer(self.batch)
        self.num_taken = self.num_micro_batches = 0

    def train(self, num_samples: int) -> bool:
        """Adds the gradient of the next samples of the batch; returns whether they were the last."""
        assert self.batch is not None
        self._waiting.close()
        stop = self.num_taken + num_samples
        part = self.run.part(self.batch, self.num_taken, stop, self.num_micro_batches)
        accumulate(self.run, part, self.observer)
        self.num_taken = stop
        self.num_micro_batches += len(part.packed.steps)
        if stop == self.batch.table.num_sequences:
            return True
        self._wait()
        return False

    def finish_step(self) -> None:
        assert self.observer is not None
        update = self.run.update(self.observer)
        self.run.publish(self.step)
        self.run.finish(self.step, self.observer, update)
        self.run.finish_publishing()  # the run's next batch may wait for it, and an error would not be seen
        self.batch = self.observer = None
        self.step += 1
        self._wait()


class RosterChanges(NamedTuple):
    """Changes that the main process found before a round; every process applies them, in this order."""

    ended: list[tuple[str, RunOutcome, str]]
    joined: list[tuple[str, TrainerRunConfig]]
    received: list[tuple[str, Batch]]
    is_over: bool


@dataclass
class ManyRuns:
    config: TrainerRunConfig
    stay: bool
    free: list[TrainedWeights]
    """Adapter slots of the model that no run trains."""

    roster: Roster
    ranks: Ranks
    stop: StopRequest
    members: dict[str, Member] = field(default_factory=dict)
    receivers: dict[str, BatchReceiver] = field(default_factory=dict)
    """Receivers by run; empty in all processes but the main one."""

    had_any: bool = False

    def rounds(self) -> Iterator[list[tuple[Member, int]]]:
        """Yields, round by round, the members to train and how many of their samples."""
        budget = self.config.trainer.model.seq_len * self.ranks.num_ranks
        for number in count():
            changes = self.ranks.share(self._await_work)
            if changes.is_over:
                return
            self._apply(changes)
            waiting = {name: member.waiting for name, member in self.members.items()}
            turns = take_turns(waiting, budget, first=number)
            yield [(self.members[name], num_samples) for name, num_samples in turns.items()]
            for member in [each for each in self.members.values() if each.step == each.run.max_steps]:
                with self.evicting(member, everywhere=True):
                    member.run.close_books()
                    member.run.save_model()
                if member.name in self.members:
                    self._end(member.name, RunOutcome.DONE)

    @contextmanager
    def evicting(self, member: Member, *, everywhere: bool = False) -> Iterator[None]:
        """Context manager: an exception inside evicts that run and leaves the others alone.

        `everywhere` says that the exception is raised in all processes at once. Without it, and with several
        processes, the exception ends the trainer: the other processes would wait for this one forever, in the
        middle of the model.
        """
        try:
            yield
        except Exception as error:
            if self.ranks.group is not None and not everywhere:
                raise
            if not isinstance(error, PellucidError):
                logger.exception("run %s", member.name)
            self._end(member.name, RunOutcome.EVICTED, f"{error}" or repr(error))

    def say_stopping(self) -> None:
        """Tells the launcher that the trainer finishes the current round before it stops."""
        step_s = max((member.run.step_s for member in self.members.values()), default=0.0)
        say_finishing("the round that it is at", step_s)

    # In the main process.

    def _await_work(self) -> RosterChanges:
        """Blocks until the roster changes or a member has samples to train."""
        with self.stop.interruptible():
            while True:
                changes = self._find_changes()
                if any(changes) or any(member.batch is not None for member in self.members.values()):
                    return changes
                time.sleep(_POLL_S)

    def _find_changes(self) -> RosterChanges:
        ended = [(name, RunOutcome.LEFT, "") for name in self.members if self.roster.is_leaving(name)]
        gone = {name for name, _, _ in ended}
        received = []
        for name, member in self.members.items():
            if name in gone or member.batch is not None:
                continue
            try:
                if (batch := self.receivers[name].poll(member.step)) is not None:
                    received.append((name, _checked(batch, member)))
            except (PayloadError, DataError, OSError) as error:
                ended.append((name, RunOutcome.EVICTED, str(error)))
        self.roster.sweep()
        joined = self._newcomers(len(self.free) + len(ended))
        is_over = not (self.stay or self.members or joined or self.roster.waiting()) and self.had_any
        return RosterChanges(ended, joined, received, is_over)

    def _newcomers(self, num_places: int) -> list[tuple[str, TrainerRunConfig]]:
        joined: list[tuple[str, TrainerRunConfig]] = []
        for name in self.roster.waiting():
            if name in self.members or len(joined) == num_places:
                continue
            try:
                config = read_run(self.roster.config_path(name), self.config)
                if (exports := ExportPaths.of_run(config)) is not None:
                    exports.check(resume=config.resume)
                self.receivers[name] = open_batches(config)
            except (PellucidError, OSError) as error:
                self._end(name, RunOutcome.EVICTED, str(error))
            else:
                joined.append((name, config))
        return joined

    # In every process.

    def _apply(self, changes: RosterChanges) -> None:
        for name, outcome, reason in changes.ended:
            end = self.leave if outcome is RunOutcome.LEFT else self._end
            end(name, outcome, reason)
        for name, config in changes.joined:
            self._join(name, config)
        for name, batch in changes.received:
            if name in self.members:
                self.members[name].receive(batch.table)

    def _join(self, name: str, config: TrainerRunConfig) -> None:
        ranks, trained = self.ranks, self.free[0]
        batches = OrchestratorBatches(self.receivers[name]) if ranks.is_main else NoBatches()
        try:
            journal = open_journal(config, ranks)
            run = build_run(config, batches, journal, [LogSink(name)], ranks, publishes=True, trained=trained)
        except (PellucidError, OSError) as error:  # raised in all processes if in one
            self._end(name, RunOutcome.EVICTED, str(error))
            return
        self.free.pop(0)
        member = self.members[name] = Member(name, run)
        self.had_any = True
        with self.evicting(member, everywhere=True):
            member.begin(config)
        logger.info("run %s joined at step %d of %d", name, member.step, run.max_steps)

    def leave(self, name: str, outcome: RunOutcome, reason: str) -> None:
        """Ends a run after a checkpoint of its finished steps; resumed, it trains its current batch again."""
        member = self.members[name]
        with self.evicting(member, everywhere=True):
            member.run.save_checkpoint()
            member.run.finish_checkpoint()
        if name in self.members:
            self._end(name, outcome, reason)

    def _end(self, name: str, outcome: RunOutcome, reason: str = "") -> None:
        """Ends a run: a member, or one that is refused before it becomes one."""
        what = "is refused"
        if (member := self.members.pop(name, None)) is not None:
            what = f"{outcome.value} at step {member.step}"
            # Gradients of an unfinished step: the next run in this slot starts without them.
            member.run.trained.module.zero_grad(set_to_none=True)
            member.run.close()
            self.free.append(member.run.trained)
        if (receiver := self.receivers.pop(name, None)) is not None:
            receiver.close()
        if self.ranks.is_main:
            self.roster.say(name, outcome, reason)
        level = logging.ERROR if outcome is RunOutcome.EVICTED else logging.INFO
        logger.log(level, "run %s %s%s", name, what, reason and f": {reason}")


def read_run(path: Path, serving: TrainerRunConfig) -> TrainerRunConfig:
    """Reads the configuration of a run; raises ConfigError if this trainer cannot train such a run."""
    try:
        config = TrainerRunConfig.model_validate(tomllib.loads(read_whole(path).decode()))
    except (OSError, DataError, ValueError, RecursionError) as error:  # neither TOML nor settings
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error
    wanted, given = (
        {
            "model.name": everywhere(each.model.name),
            "model.lora": each.model.lora,
            "trainer.enable_router_replay": each.trainer.enable_router_replay,
            "trainer.replay_expert_weights": each.trainer.replay_expert_weights,
        }
        for each in (config, serving)
    )
    for key, value in wanted.items():
        if value != given[key]:
            raise ConfigError(f"{key} = {value}; the trainer that it joins has {given[key]}: set the same")
    limit = serving.trainer.model.seq_len
    if (seq_len := config.trainer.model.seq_len) > limit:
        raise ConfigError(
            f"trainer.model.seq_len = {seq_len} exceeds the {limit} of the trainer that it joins; lower it, "
            "or raise the trainer's"
        )
    return config


def _checked(batch: Batch, member: Member) -> Batch:
    if strangers := sorted(set(batch.table["run_id"].tolist()) - {member.name}):
        raise DataError(f"the batch of step {batch.step} has samples of another run: {strangers[0]!r}")
    member.run.check(batch.step, batch.table)
    return batch


def join_trainer(config: TrainerRunConfig) -> None:
    """Has a run trained by the trainer that `trainer.join` names, and returns once it is done.

    A run waits until that trainer starts. Raises ProcessError, with the reason, if the run ended earlier or
    the trainer disappears.
    """
    folder = config.trainer.join
    assert folder is not None
    model = config.model.model_copy(update={"name": everywhere(config.model.name)})
    absolute = {"output_dir": config.output_dir.resolve(), "run_id": config.run_name, "model": model}
    roster, name = Roster(folder), config.run_name
    stop, stopped = StopRequest(), None
    was_there, reminded = False, -_REMIND_S
    with stop.listening(), roster.joined(name, to_toml(config.model_copy(update=absolute))):
        while (ended := roster.outcome(name)) is None:
            try:
                stop.check()
            except Stopped as request:
                if stopped is None:
                    roster.leave(name)
                    say(f"waiting for the trainer in {folder} to save the run", silence_s=DISK_SILENCE_S)
                stopped = request
            is_there = roster.has_trainer()
            # A trainer writes the outcome before it goes.
            if was_there and not is_there and roster.outcome(name) is None:
                raise ProcessError(
                    f"the trainer in {folder} is gone; start it again, then go on with --resume"
                )
            if not is_there and time.monotonic() - reminded > _REMIND_S:
                reminded = time.monotonic()
                logger.warning("no trainer serves runs in %s yet; waiting for one", folder)
            was_there = is_there
            if not is_there and stopped is not None:
                break
            time.sleep(_JOIN_POLL_S)
    if stopped is not None:
        raise SystemExit(128 + stopped.signal)
    assert ended is not None
    outcome, reason = ended
    if outcome is not RunOutcome.DONE:
        raise ProcessError(f"run {name} was {outcome.value} by the trainer in {folder}: {reason}")
