"""A whole run in one process, of real parts: scheduler, judge, books, clerk, channel, packing, loss,
observers, checkpoints, resume. Only the tokens are made up: no model samples them, and none predicts them.

Each side stands for a process of a run. What is in its attributes dies with it; its files stay.

    EngineSide ──turns──> OrchestratorSide ──batches/──> TrainerSide
         ^                                                    │
         └──────────────────── weights/ ──────────────────────┘
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from pellucid.checkpoint import Progress, newest_intact, publish_checkpoint, take_back
from pellucid.config import DppoLossConfig, OrchestratorRunConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.inference.client import Account
from pellucid.inference.slots import EngineCounts
from pellucid.launch.run_folder import ResumePoint, rewind_rl
from pellucid.ledger import Flow, Journal, Stage, State, link_of, sum_entries
from pellucid.loss import LossInputs, dppo_loss
from pellucid.model import TokenOutput
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.books import Books, Clerk
from pellucid.orchestrator.group import judge_evaluated
from pellucid.orchestrator.records import FILE
from pellucid.orchestrator.scheduler import Rules, Scheduler, Source
from pellucid.orchestrator.snapshot import Snapshot, settle_orchestrator
from pellucid.orchestrator.verdict import Filter, FilterInputs, Judge
from pellucid.packing import pack_batch
from pellucid.trainer.observer import StepObserver
from pellucid.trainer.step import LoadedMicroBatch, LossResult, StepBatch
from pellucid.transport import stable_steps
from pellucid.transport.spool import FilesystemReceiver, FilesystemSender
from pellucid.transport.weights import publish_version, published_versions, write_version

RUN = "run"
SOURCES = [Source("math"), Source("debate", group_scored=True)]
QUIZ = "quiz"
"""The environment of evaluations."""

MAX_STEPS = 6
SEQ_LEN = 12
NAMES = ("inference", "orchestrator", "trainer")
"""Of the processes, as in `SmallRun.crash`."""


class KilledError(Exception):
    """A process dies here."""


class Said(NamedTuple):
    """One turn: how many tokens, whether it goes on from the turn before, and whether they may train."""

    num_tokens: int
    extends: bool = True
    trainable: bool = True


class Attempt(NamedTuple):
    """What a rollout does, and how it ends."""

    turns: Sequence[Said] = ()
    reward: float = 1.0
    error: str | None = None
    unwanted: bool = False
    """The filter takes it out."""

    broken: bool = False
    """Its logprobs are no numbers: no sample can be made of it."""


def steady() -> Iterator[Attempt]:
    """Nothing goes wrong; every other rollout is right, and every third is longer than `SEQ_LEN`."""
    for number in count():
        yield Attempt([Said(3 + 5 * (number % 3))], reward=number % 2)


def configure(folder: Path, *, resume: bool = False) -> OrchestratorRunConfig:
    return OrchestratorRunConfig.model_validate(
        {
            "output_dir": folder,
            "run_id": RUN,
            "model": {"name": "none"},
            "max_steps": MAX_STEPS,
            "seq_len": 200,
            "resume": resume,
            "orchestrator": {
                "env": [{"id": "x:Env", "name": source.env_name} for source in SOURCES],
                "eval": [{"id": "x:Env", "name": QUIZ}],
            },
        }
    )


class EngineSide:
    """Counts as `inference.engine` does, and writes down as its thread does."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._journal = Journal(folder / "ledger" / "inference.jsonl", Stage.INFERENCE, resume=resume)
        self._written: dict[Flow | State, Counter[Account]] = defaultdict(Counter)
        self._running: dict[str, _Asked] = {}
        """By rollout."""
        self._unheard: Counter[Account] = Counter()
        """Tokens of answers that reached nobody."""
        self._folder = folder
        self.counts = EngineCounts()
        self.client = ""
        """The process of the orchestrator that asks."""

    @property
    def version(self) -> int:
        return max(published_versions(self._folder), default=0)

    @property
    def num_unwritten(self) -> int:
        """Tokens that were sampled since the last `flush`."""
        return self.counts.sampled.total() - self._written[Flow.SAMPLED].total()

    def sample(self, rollout: Rollout, num_tokens: int) -> None:
        asked = self._ask(rollout)
        self.counts.sampled[asked.account] += num_tokens
        asked.runs.append((self.version, num_tokens))

    def _ask(self, rollout: Rollout) -> "_Asked":
        account = Account(RUN, rollout.env_name, self.client)
        return self._running.setdefault(rollout.rollout_id, _Asked(account, []))

    def has_begun(self, rollout: Rollout) -> bool:
        return bool(rollout.turns) or rollout.rollout_id in self._running

    def answer(self, rollout: Rollout) -> tuple[list[tuple[int, int]], str]:
        """Runs and link."""
        account, runs = self._ask(rollout)
        del self._running[rollout.rollout_id]
        self.counts.delivered[account] += sum(tokens for _, tokens in runs)
        return runs, link_of(self._journal.process, account.client)

    def answer_nobody(self, rollout: Rollout) -> None:
        """It hangs, and the request was given up by the time it answers."""
        account = self._ask(rollout).account
        runs, _ = self.answer(rollout)
        self._unheard[account] += sum(tokens for _, tokens in runs)

    def recover(self) -> None:
        """It can be reached again, and is told which answers nobody took."""
        self.counts.delivered.subtract(self._unheard)
        self.counts.cancelled.update(self._unheard)
        self._unheard.clear()

    def abandon(self, rollout: Rollout) -> None:
        """Nobody waits for the answer any more."""
        account, runs = self._ask(rollout)
        del self._running[rollout.rollout_id]
        self.counts.cancelled[account] += sum(tokens for _, tokens in runs)

    def flush(self) -> None:
        for what, counter in (
            (Flow.SAMPLED, self.counts.sampled),
            (Flow.DELIVERED, self.counts.delivered),
            (State.CANCELLED, self.counts.cancelled),
        ):
            for account, tokens in counter.items():
                link = link_of(self._journal.process, account.client)
                self._journal.count(
                    account.run, account.env, what, tokens - self._written[what][account], link
                )
            self._written[what] = Counter(counter)
        self._journal.flush(self.version)

    def stop(self, inflight: Collection[Rollout] = ()) -> None:
        for rollout in inflight:
            self.abandon(rollout)
        self.recover()
        self.flush()
        self._journal.close(self.version)


class _Asked(NamedTuple):
    """A turn that is being sampled."""

    account: Account
    runs: list[tuple[int, int]]
    """(policy version, tokens)."""


class MortalBooks(Books):
    may_die = False

    def mark(self, step: int) -> int:
        """What a snapshot starts with."""
        if self.may_die:
            raise KilledError
        return super().mark(step)


class MortalSender(FilesystemSender):
    may_die = False

    def send(self, step: int, payload: bytes) -> None:
        if self.may_die:
            raise KilledError
        super().send(step, payload)


def _wanted(inputs: FilterInputs) -> list[bool]:
    return ["unwanted" not in rollout.metrics for rollout in inputs.rollouts]


class OrchestratorSide:
    """What `orchestrator.loop` does, one thing at a time."""

    def __init__(self, config: OrchestratorRunConfig, engine: EngineSide, *, batch_size: int) -> None:
        snapshot = settle_orchestrator(config) if config.resume else Snapshot()
        self._ids = count(100)
        self.scheduler = Scheduler(
            Rules(
                batch_size=batch_size,
                rollouts_per_example=2,
                max_inflight_rollouts=6,
                max_async_level=1,
                max_off_policy_steps=1,
                max_steps=MAX_STEPS,
            ),
            SOURCES,
            Judge(RUN, load_advantage(config.orchestrator.advantage), True, [Filter("wanted", _wanted)]),
        )
        self.books = MortalBooks(config, last_mark=snapshot.mark)
        self._sender = MortalSender(config.output_dir)
        self._clerk = Clerk(config, self.books, self._sender)
        self.inflight: dict[str, Rollout] = {}
        self.connect(engine)
        if config.resume:
            self.scheduler.restore(snapshot.scheduler_state(RUN))

    def connect(self, engine: EngineSide) -> None:
        self._engine = engine
        engine.client = self.books.process

    def dispatch(self) -> None:
        self.scheduler.update_policy(self._engine.version)
        while (start := self.scheduler.next_dispatch()) is not None:
            example = Example(str(start.example_index), [{"role": "user", "content": "hi"}])
            rollout = Rollout(start.rollout_id, start.group_id, example, start.env_name, 1.0)
            self.inflight[rollout.rollout_id] = rollout

    def take_turn(self, rollout: Rollout, said: Said, *, broken: bool = False) -> None:
        """The engine samples what is missing and answers; the turn is recorded."""
        self._engine.sample(rollout, said.num_tokens)
        self._record(rollout, said, "stop", broken=broken)

    def _record(self, rollout: Rollout, said: Said, finish_reason: str, *, broken: bool = False) -> None:
        runs, link = self._engine.answer(rollout)
        num_tokens = sum(tokens for _, tokens in runs)
        token_ids = [next(self._ids) for _ in range(num_tokens)]
        logprobs = [float("nan") if broken else -0.5] * num_tokens
        prompt_ids = [1, 2, 3 + int(rollout.example.example_id)]
        if rollout.turns and said.extends:
            last = rollout.turns[-1].tokens
            prompt_ids = [*last.prompt_ids.tolist(), *last.token_ids.tolist(), 99]
        completion = Completion(token_ids, logprobs, runs, finish_reason, link=link)
        rollout.turns.append(Turn(prompt_ids, completion, "text", trainable=said.trainable))

    def play(self, rollout: Rollout, attempt: Attempt) -> None:
        """To its end; it may have turns already."""
        for said in attempt.turns:
            self.take_turn(rollout, said, broken=attempt.broken)
        rollout.reward = None if attempt.error else attempt.reward
        rollout.error = attempt.error
        if attempt.unwanted:
            rollout.metrics["unwanted"] = 1.0
        del self.inflight[rollout.rollout_id]
        self.scheduler.finish(rollout)

    def send(self, *, killed_before: str | None = None) -> bool:
        """A batch, if there is one: books, then `snapshot`, then `batch`."""
        batch = self.scheduler.take_batch()
        if batch is not None:
            self.books.may_die = killed_before == "snapshot"
            self._sender.may_die = killed_before == "batch"
            own = {"policy_version": self._engine.version, "time/batch_s": 1.0, "time/wait_weights_s": 0.0}
            state, settled = self.scheduler.state(), self.scheduler.take_settled()
            asyncio.run(self._clerk.send(batch, settled, state, own))
        return batch is not None

    def settle(self) -> None:
        """Without a snapshot: a resume does not know of it."""
        if settled := self.scheduler.take_settled():
            asyncio.run(self._clerk.settle(self.scheduler.batches_sent, settled))

    def save(self) -> None:
        asyncio.run(self._clerk.save(self.scheduler.take_settled(), self.scheduler.state()))

    def evaluate(self, turns: Sequence[Said], *, completely: bool) -> None:
        """The policy version that is served, unless that is done."""
        version = self._engine.version
        if version in self.books.evaluated:
            return
        rollout = Rollout(f"eval-{version}", f"eval-{version}", Example("0", []), QUIZ, 1.0)
        for said in turns:
            self.take_turn(rollout, said)
        rollout.reward = 1.0
        self.books.settle_evaluation(version, judge_evaluated([rollout]))
        if completely:
            self.save()
            self.books.report_evaluation(version, {"eval/quiz/avg@1": 1.0})

    def stop(self, *, engine_answers: bool = True) -> None:
        """What is in flight is cut short; the engine, if there is one, answers with what it has."""
        self.scheduler.stop()
        for rollout in list(self.inflight.values()):
            if engine_answers:
                self._record(rollout, Said(0), "abort")
            self.play(rollout, Attempt())
        self.save()
        step = self.scheduler.batches_sent
        if step == MAX_STEPS:
            self.books.finish(step)
        self.release()

    def release(self) -> None:
        """Threads and files, as the end of a process would; nothing is written."""
        self._clerk.close()
        self.books.close()


class TrainerSide:
    """What `trainer.loop` does, with logprobs out of a hat; one journal per rank, as in as many processes."""

    def __init__(self, folder: Path, *, resume: bool, num_ranks: int) -> None:
        progress = newest_intact(folder) if resume else None
        if resume:
            take_back(folder, progress)
        names = ["trainer.jsonl", *(f"trainer_{rank}.jsonl" for rank in range(1, num_ranks))]
        self.journals = [Journal(folder / "ledger" / name, Stage.TRAINER, resume=resume) for name in names]
        self._folder = folder
        self._receiver = FilesystemReceiver(folder)
        self.num_trained = self._num_saved = progress.step if progress is not None else 0

    def train(self, *, killed_after_ranks: int | None = None, is_skipped: bool = False) -> bool:
        """The next step, if its batch is there; or as far as so many ranks have booked it."""
        step = self.num_trained
        batch = self._receiver.poll(step) if step < MAX_STEPS else None
        if batch is None:
            return False
        observers = self.observe(step, batch.table)
        publish_version(self._folder, step + 1, lambda to: write_version(nn.Linear(1, 1), to), keep=9)
        for number, (observer, journal) in enumerate(zip(observers, self.journals, strict=True)):
            if number == killed_after_ranks:
                raise KilledError
            if is_skipped:
                observer.is_skipped = True
            observer.write_ledger(journal)
        self.num_trained += 1
        return True

    def observe(self, step: int, table) -> list[StepObserver]:
        """What each rank makes of its part."""
        packed = pack_batch(
            table, seq_len=SEQ_LEN, max_tokens=16, num_ranks=len(self.journals), pad_to_multiple_of=4
        )
        observers = []
        for rank in range(len(self.journals)):
            batch = StepBatch(step, packed, torch.device("cpu"), rank)
            observers.append(StepObserver(batch, None))
            for micro_batch in batch.micro_batches:
                observers[-1].add(micro_batch, *_made_up(micro_batch, batch.denominator))
        return observers

    def save(self) -> None:
        """Of the steps trained so far, unless there is one."""
        if self.num_trained == self._num_saved:
            return
        booked = [entry for journal in self.journals for entry in journal.totals()]
        progress = Progress(self.num_trained, {}, b"", sum_entries(booked))
        needed_from = publish_checkpoint(self._folder, progress, _write_state, keep_last=2)
        self._receiver.release_before(needed_from)
        self._num_saved = self.num_trained

    def end(self) -> None:
        self.save()
        for journal in self.journals:
            journal.close(MAX_STEPS)


def _made_up(micro_batch: LoadedMicroBatch, denominator: int) -> tuple[TokenOutput, LossResult]:
    """Every third token is far from what was sampled: outside of the trust region on one side."""
    token_ids = micro_batch.tokens["token_ids"]
    logprobs = torch.where(token_ids % 3 == 0, -0.01, torch.where(token_ids % 3 == 1, -0.5, -2.0))
    inputs = LossInputs.of(micro_batch.tokens, logprobs)
    record = dppo_loss(inputs, DppoLossConfig())
    result = LossResult(record.token_loss.sum() / denominator, inputs, record)
    return TokenOutput(logprobs, logprobs.abs()), result


def _write_state(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"model and optimizer")


@dataclass
class SmallRun:
    folder: Path
    num_ranks: int = 1
    batch_size: int = 2
    """A group has 2 rollouts: with more, one that is ready waits for another."""

    resume: bool = False

    def __post_init__(self) -> None:
        self.start(resume=self.resume)

    @property
    def ledger_dir(self) -> Path:
        return self.folder / "ledger"

    def start(self, *, resume: bool) -> None:
        self.engine = EngineSide(self.folder, resume=resume)
        self.orchestrator: OrchestratorSide | None = OrchestratorSide(
            configure(self.folder, resume=resume), self.engine, batch_size=self.batch_size
        )
        self.trainer: TrainerSide | None = TrainerSide(self.folder, resume=resume, num_ranks=self.num_ranks)

    def crash(self, killed: Collection[str], *, torn: bool = False) -> None:
        """These die where they stand, and perhaps in the middle of a line; the others are stopped."""
        if self.orchestrator is not None:
            if "orchestrator" in killed:
                self.orchestrator.release()
            else:
                self.orchestrator.stop(engine_answers="inference" not in killed)
        if "inference" not in killed:
            self.engine.stop(self.orchestrator.inflight.values() if self.orchestrator else ())
        if self.trainer is not None and "trainer" not in killed:
            self.trainer.save()
        if torn:
            self._tear(killed)
        self.orchestrator = self.trainer = None

    def _tear(self, names: Collection[str]) -> None:
        """Killed in the middle of a line."""
        for name in names:
            with (self.ledger_dir / f"{name}.jsonl").open("ab") as file:
                file.write(b'{"stage":"' + name.encode())

    def restart(self, names: Collection[str], *, torn: bool = False, is_late: bool = False) -> None:
        """These are killed and start again, each on its own, while the others go on.

        `is_late`: an engine that goes on answers an orchestrator that is gone; else it notices, and gives up.
        One that is killed has sent answers that did not arrive.
        """
        old, engine = self.orchestrator, self.engine
        for rollout in old.inflight.values() if old is not None else ():
            if {"inference", "orchestrator"} & set(names) and engine.has_begun(rollout):
                engine.answer(rollout) if is_late else engine.abandon(rollout)
        if "inference" in names and is_late:
            engine.flush()
        if torn:
            self._tear(names)
        if "inference" in names:
            self.engine = EngineSide(self.folder, resume=True)
        if old is not None and "orchestrator" in names:
            old.release()
            config = configure(self.folder, resume=True)
            self.orchestrator = OrchestratorSide(config, self.engine, batch_size=self.batch_size)
        elif old is not None and "inference" in names:
            for rollout in [each for each in old.inflight.values() if engine.has_begun(each)]:
                old.play(rollout, Attempt(error="UnreachableError: gone"))
            old.connect(self.engine)
        if self.trainer is not None and "trainer" in names:
            self.trainer = TrainerSide(self.folder, resume=True, num_ranks=self.num_ranks)

    def damage(self, folder: str, name: str) -> None:
        """The newest file of this name in `folder/step_N/`, or in the folder itself if another stands in."""
        snapshots = sorted((self.folder / folder).glob("*.bin"))
        if name == "orchestrator.bin" and len(snapshots) == 2:
            (self.folder / folder / name).write_bytes(b"damaged")
        steps = [] if name == "orchestrator.bin" else stable_steps(self.folder / folder)
        if steps:
            (self.folder / folder / f"step_{steps[-1]}" / name).write_bytes(b"damaged")

    def rewind(self) -> ResumePoint:
        return rewind_rl(configure(self.folder))

    def go_on(self) -> None:
        """What the processes do by themselves: start what may start, and leave when nothing is left to do."""
        if self.orchestrator is not None:
            self.orchestrator.dispatch()
            if self.orchestrator.scheduler.batches_sent == MAX_STEPS:
                self.orchestrator.stop()
                self.orchestrator = None
        if self.trainer is not None and self.trainer.num_trained == MAX_STEPS:
            self.trainer.end()
            self.trainer = None

    def advance(
        self, attempts: Iterator[Attempt], *, only_fresh: bool = False, is_skipped: bool = False
    ) -> None:
        """Plays all rollouts, or those that have not begun; sends what is ready, and trains a step."""
        if self.orchestrator is not None:
            for rollout in list(self.orchestrator.inflight.values()):
                if not (only_fresh and self.engine.has_begun(rollout)):
                    self.orchestrator.play(rollout, next(attempts))
            while self.orchestrator.send():
                pass
        if self.trainer is not None:
            self.trainer.train(is_skipped=is_skipped)
        self.go_on()

    def finish(self) -> None:
        """Whatever is left, without further losses."""
        self.go_on()
        while self.orchestrator is not None or self.trainer is not None:
            self.advance(steady())
        self.engine.stop()


def stop_after_four_steps(folder: Path) -> None:
    """Leaves a run that has checkpoints after two and four steps."""
    run, attempts = SmallRun(folder), steady()
    while run.trainer is not None and run.trainer.num_trained < 4:
        run.go_on()
        run.advance(attempts)
        if run.trainer is not None and run.trainer.num_trained == 2:
            run.trainer.save()
    run.crash([])


class SavedRollout(msgspec.Struct):
    env_name: str
    outcome: str
    num_tokens: int


def saved_tokens(folder: Path) -> Counter[tuple[str, str]]:
    """Sampled tokens of the saved rollouts, by (environment, outcome)."""
    tokens: Counter[tuple[str, str]] = Counter()
    for path in (folder / "rollouts").glob(f"step_*/{FILE}"):
        for line in path.read_bytes().splitlines():
            saved = msgspec.json.decode(line, type=SavedRollout)
            tokens[saved.env_name, saved.outcome] += saved.num_tokens
    return tokens
