"""Whatever is lost, wherever: the books balance after every event, and nothing is left open in the end.

Rollouts fail, lose their group, grow stale, are filtered, rejected or without signal; tokens are cut off,
untrainable or outside of the trust region; processes are killed between any two events and in the middle of
some; batches and checkpoints are damaged. Then the run goes on.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pellucid.data import Rollout
from pellucid.ledger import Report, State, read_journal, reconcile
from small_run import NAMES, RUN, SOURCES, Attempt, KilledError, Said, SmallRun, saved_tokens, steady

SEEDS = st.integers(0, 2**16)
DAMAGED = [
    *(None, None),
    *(("batches", "batch.bin"), ("checkpoints", "state/weights"), ("checkpoints", "orchestrator.bin")),
]
SAVED = (
    *("failed_rollout", "dropped_group", "stale", "filtered", "zero_advantage", "rejected"),
    "rolled_back",
)
"""States that a rollout is saved with."""

OF_TRAINER = ("truncated", "untrainable", "skipped", "masked", "trained")
"""States that the tokens of a rollout have that is saved as sent."""


class Crash(NamedTuple):
    killed: set[str]
    torn: bool = False
    """In the middle of a line of their journals."""

    damaged: tuple[str, str] | None = None
    """The newest of these files."""

    num_rewinds: int = 1
    num_ranks: int | None = None
    """Of the trainer that goes on."""


def crash_of(random: Random) -> Crash:
    return Crash(
        killed={name for name in NAMES if random.random() < 0.6},
        torn=random.random() < 0.5,
        damaged=random.choice(DAMAGED),
        num_rewinds=random.randint(1, 2),
        num_ranks=random.randint(1, 2),
    )


def attempts(random: Random) -> Iterator[Attempt]:
    """Some are long, some cannot train; equal rewards leave no signal."""
    while True:
        turns = [said(random) for _ in range(random.randint(1, 3))]
        error = "ValueError: no" if random.random() < 0.15 else None
        unwanted, broken = (random.random() < 0.15 for _ in range(2))
        yield Attempt(turns, random.randint(0, 1), error, unwanted, broken)


def said(random: Random) -> Said:
    return Said(random.randint(1, 6), extends=random.random() < 0.7, trainable=random.random() < 0.7)


class EveryLoss(RuleBasedStateMachine):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen
        """States in which a token was, in any run."""

    @initialize(num_ranks=st.integers(1, 2), batch_size=st.integers(2, 3), seed=SEEDS)
    def start(self, num_ranks: int, batch_size: int, seed: int) -> None:
        self.past = seed
        self.folder = Path(tempfile.mkdtemp())
        self.run = SmallRun(self.folder, num_ranks, batch_size)
        self.run.go_on()
        self.num_sampled = 0
        """By engines that are gone."""
        self.num_unknown = 0
        """Of these, what nobody may know of."""

    def chance(self, seed: int) -> Random:
        """Depends on all that happened before, so that examples which begin alike do not go on alike."""
        self.past = hash((self.past, seed))
        return Random(self.past)

    def pick(self, data: st.DataObject) -> Rollout:
        inflight = self.run.orchestrator.inflight
        return inflight[data.draw(st.sampled_from(sorted(inflight)), label="rollout")]

    def has_rollouts(self) -> bool:
        return self.run.orchestrator is not None and bool(self.run.orchestrator.inflight)

    @precondition(has_rollouts)
    @rule(data=st.data(), seed=SEEDS, ends=st.sampled_from(["not yet", "answered", "given up"]))
    def sample(self, data: st.DataObject, seed: int, ends: str) -> None:
        rollout, turn = self.pick(data), said(self.chance(seed))
        if ends == "answered":
            self.run.orchestrator.take_turn(rollout, turn)
        else:
            self.run.engine.sample(rollout, turn.num_tokens)
        if ends == "given up":
            self.run.engine.abandon(rollout)
            self.run.orchestrator.play(rollout, Attempt(error="InferenceError: gone"))
        self.run.go_on()

    @precondition(has_rollouts)
    @rule(data=st.data(), seed=SEEDS, in_journal=st.booleans(), comes_back=st.booleans())
    def hang(self, data: st.DataObject, seed: int, in_journal: bool, comes_back: bool) -> None:
        """The server loses a request, which is asked again of another one, and answers it too late."""
        rollout, turn = self.pick(data), said(self.chance(seed))
        self.run.engine.sample(rollout, turn.num_tokens)
        self.run.engine.answer_nobody(rollout)
        if in_journal:
            self.run.engine.flush()
        self.run.orchestrator.take_turn(rollout, turn)
        if comes_back:
            self.run.engine.recover()
        self.run.go_on()

    @precondition(has_rollouts)
    @rule(data=st.data(), seed=SEEDS, killed_before=st.sampled_from([None, None, "snapshot", "batch"]))
    def finish_a_group(self, data: st.DataObject, seed: int, killed_before: str | None) -> None:
        """And send the batch that it completes."""
        chosen, group = attempts(self.chance(seed)), self.pick(data).group_id
        for rollout in list(self.run.orchestrator.inflight.values()):
            if rollout.group_id == group:
                self.run.orchestrator.play(rollout, next(chosen))
        try:
            self.run.orchestrator.send(killed_before=killed_before)
        except KilledError:
            self.go_on_after(Crash({"orchestrator"}))
        self.run.go_on()

    @rule(seed=SEEDS, one_is_slow=st.booleans(), is_skipped=st.booleans())
    def advance(self, seed: int, one_is_slow: bool, is_skipped: bool) -> None:
        """A slow rollout is left behind by two batches, so that its group is stale when it comes back."""
        if one_is_slow and self.has_rollouts():
            self.run.engine.sample(next(iter(self.run.orchestrator.inflight.values())), 2)
            for _ in range(2):
                self.run.advance(steady(), only_fresh=True)
        self.run.advance(attempts(self.chance(seed)), is_skipped=is_skipped)

    @precondition(lambda self: self.run.trainer is not None)
    @rule(is_saved=st.booleans(), killed_after_ranks=st.sampled_from([None, None, 0, 1]))
    def train(self, is_saved: bool, killed_after_ranks: int | None) -> None:
        try:
            self.run.trainer.train(killed_after_ranks=killed_after_ranks)
        except KilledError:
            self.go_on_after(Crash({"trainer"}))
        if is_saved:
            self.run.trainer.save()
        self.run.go_on()

    @rule()
    def flush_the_engine(self) -> None:
        self.run.engine.flush()

    @precondition(lambda self: self.run.orchestrator is not None)
    @rule(is_saved=st.booleans())
    def write_down(self, is_saved: bool) -> None:
        if is_saved:
            self.run.orchestrator.save()
        else:
            self.run.orchestrator.settle()

    @precondition(lambda self: self.run.orchestrator is not None)
    @rule(seed=SEEDS, completely=st.booleans())
    def evaluate(self, seed: int, completely: bool) -> None:
        self.run.orchestrator.evaluate([said(self.chance(seed))], completely=completely)

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        self.go_on_after(crash_of(self.chance(seed)))

    @rule(seed=SEEDS, is_late=st.booleans())
    def restart(self, seed: int, is_late: bool) -> None:
        """Some processes die and are started again, while the others go on."""
        random = self.chance(seed)
        names = {name for name in NAMES if random.random() < 0.5}
        engine, self.run.num_ranks = self.run.engine, random.randint(1, 2)
        if "orchestrator" in names and random.random() < 0.2:
            self.run.damage("checkpoints", "orchestrator.bin")
        self.run.restart(names, torn=random.random() < 0.5, is_late=is_late)
        if "inference" in names:
            self.num_sampled += engine.counts.sampled.total()
            self.num_unknown += engine.num_unwritten
        self.run.go_on()

    def go_on_after(self, crash: Crash) -> None:
        self.run.crash(crash.killed, torn=crash.torn)
        self.books_balance()
        if crash.damaged is not None:
            self.run.damage(*crash.damaged)
        engine = self.run.engine
        point = self.run.rewind()
        for _ in range(crash.num_rewinds - 1):
            again = self.run.rewind()
            assert (again.checkpoint, again.next_batch) == (point.checkpoint, point.next_batch)
            assert again.num_lost == again.num_rolled_back == 0
        self.run.num_ranks = crash.num_ranks or self.run.num_ranks
        self.run.start(resume=True)
        self.num_sampled += engine.counts.sampled.total()
        self.num_unknown += engine.num_unwritten
        self.run.go_on()

    def has_books(self) -> bool:
        """Those of a run that has just begun are empty."""
        return any(any(read_journal(path)) for path in self.run.ledger_dir.iterdir())

    @invariant()
    def books_balance(self) -> None:
        """The sums only while the engine has written down all that it did; else others are ahead of it."""
        if self.has_books():
            self.check(adds_up=not self.run.engine.num_unwritten)

    def check(self, *, adds_up: bool) -> Report:
        report = reconcile(self.run.ledger_dir)
        assert report.balanced, report.verdict()
        self._seen.update(*report.states.values())
        if adds_up:
            for account, states in report.states.items():
                assert states.total() == report.sampled[account]
            total = self.num_sampled + self.run.engine.counts.sampled.total()
            assert total - self.num_unknown <= sum(report.sampled.values()) <= total
        return report

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        try:
            if self.run.orchestrator is not None:
                self.evaluate(seed=0, completely=True)
            self.advance(seed=0, one_is_slow=True, is_skipped=False)
            self.crash(seed=0)
            self.run.finish()
            report = self.check(adds_up=True)
            assert not report.running and not any(states["in_flight"] for states in report.states.values())
            self.compare_with_saved_rollouts(report)
        finally:
            shutil.rmtree(self.folder)

    def compare_with_saved_rollouts(self, report: Report) -> None:
        """A rollout is saved with what became of it: its tokens are in that state, or went to the trainer."""
        saved = saved_tokens(self.folder)
        for source in SOURCES:
            states = report.states.get((RUN, source.env_name), Counter())
            for state in SAVED:
                assert saved[source.env_name, state] == states[state], state
            assert saved[source.env_name, "sent"] == sum(states[state] for state in OF_TRAINER)


def test_whatever_is_lost_the_books_balance() -> None:
    seen: set[str] = set()
    run_state_machine_as_test(
        lambda: EveryLoss(seen),
        settings=settings(max_examples=25, stateful_step_count=12, deadline=None, derandomize=True),
    )
    assert seen == {state.value for state in State}
