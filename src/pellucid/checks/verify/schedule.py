"""The scheduler alone, with batches that count tokens, held to the oracle's at every turn.

Rollouts of known length come back in a random order, some fail and are attempted again, some groups have no
signal, weights are late. Halfway the run is killed and goes on from its snapshot.
"""

import random
from collections.abc import Sequence

import msgspec

from pellucid.checks.finding import EPS, Differences
from pellucid.checks.oracle.schedule import Schedule
from pellucid.data import Completion, Example, Rollout, TrainingSample, Turn
from pellucid.ledger import Flow, State
from pellucid.orchestrator.scheduler import Dispatch, Rules, Scheduler, Source
from pellucid.orchestrator.snapshot import Snapshot, take_snapshot
from pellucid.orchestrator.verdict import Verdict

STAGE = "batches by tokens"
WEIGHTS = {"often": 3.0, "seldom": 1.0}
BATCH_TOKENS = 150
GROUP_SIZE = 2
MAX_INFLIGHT = 12
MAX_RETRIES = 1
LONGEST = 60
NUM_BATCHES = 40
"""Enough for more groups than are remembered."""

PROMPT = (1, 2, 3)
FAILS, PUBLISHES, ASKS = 0.4, 0.3, 0.3
"""Chances that a rollout fails, and, before the next is back, that weights arrive and that a batch is taken.
So now and then there is more than enough for one."""


def check_schedule(differences: Differences) -> None:
    for max_async_level in (0, 1):
        _Drive(max_async_level, differences).run()


def has_signal(example: int) -> bool:
    return example % 4 != 3


def judge(rollouts: Sequence[Rollout]) -> list[Verdict]:
    """Makes every turn a sample of its own."""
    if not has_signal(int(rollouts[0].example.example_id)):
        return [Verdict(rollout, State.ZERO_ADVANTAGE, advantage=0.0) for rollout in rollouts]
    return [
        Verdict(rollout, Flow.SENT, advantage=1.0, samples=[_sample(rollout, turn) for turn in rollout.turns])
        for rollout in rollouts
    ]


def _sample(rollout: Rollout, turn: Turn) -> TrainingSample:
    replies = [4] * turn.num_tokens
    return TrainingSample.from_turn(
        PROMPT, replies, [-0.5] * len(replies), env_name=rollout.env_name, advantage=1.0
    )


def _rollout(dispatch: Dispatch, replies: Sequence[int], error: str | None) -> Rollout:
    completions = [Completion([4] * size, [-0.5] * size, [(0, size)], "stop") for size in replies]
    return Rollout(
        dispatch.rollout_id,
        dispatch.group_id,
        Example(str(dispatch.example_index), []),
        dispatch.env_name,
        1.0,
        [Turn(list(PROMPT), completion, "") for completion in completions],
        1.0,
        error=error,
    )


class _Drive:
    """Both schedulers side by side, up to the first answer in which they differ."""

    def __init__(self, max_async_level: int, differences: Differences) -> None:
        self._differences = differences
        self._where = f"max_async_level {max_async_level}"
        self._generator = random.Random(max_async_level)
        self._rules = Rules(
            batch_size=BATCH_TOKENS,
            rollouts_per_example=GROUP_SIZE,
            max_inflight_rollouts=MAX_INFLIGHT,
            max_async_level=max_async_level,
            max_off_policy_steps=NUM_BATCHES,
            max_steps=NUM_BATCHES,
            max_rollout_tokens=LONGEST,
            max_retries=MAX_RETRIES,
        )
        self._found = self._scheduler()
        self._expected = Schedule(
            WEIGHTS,
            batch_tokens=BATCH_TOKENS,
            group_size=GROUP_SIZE,
            max_inflight=MAX_INFLIGHT,
            max_async_level=max_async_level,
            max_retries=MAX_RETRIES,
            longest=LONGEST,
            num_batches=NUM_BATCHES,
        )
        self._inflight: list[Dispatch] = []
        self._is_resumed = False

    def _scheduler(self) -> Scheduler:
        return Scheduler(self._rules, [Source(env, weight) for env, weight in WEIGHTS.items()], judge)

    def run(self) -> None:
        while self._expected.num_taken < NUM_BATCHES:
            if not self._agree_on_starts():
                return
            is_idle = not self._inflight
            if (is_idle or self._generator.random() < ASKS) and not self._agree_on_batch():
                return
            if is_idle or self._generator.random() < PUBLISHES:
                if is_idle and self._expected.version == self._expected.num_taken:
                    break  # the oracle has nothing more to do, either: reported below
                self._publish()
            if self._inflight:
                self._finish_one()
            if not self._is_resumed and self._expected.num_taken >= NUM_BATCHES // 2:
                self._resume()
        self._same(NUM_BATCHES, self._expected.num_taken, "batches until nothing starts any more")

    def _same(self, expected: object, found: object, what: str) -> bool:
        where = f"{self._where}, before batch {self._expected.num_taken}, {what}"
        self._differences.same(STAGE, expected, found, where)
        return expected == found

    def _agree_on_starts(self) -> bool:
        while True:
            expected, found = self._expected.next_start(), self._found.next_dispatch()
            started = found and (found.env_name, found.example_index, found.rollout_id)
            if not self._same(expected, started, "environment, example and rollout to start"):
                return False
            if found is None:
                return True
            self._inflight.append(found)

    def _agree_on_batch(self) -> bool:
        expected, found = self._expected.take_batch(), self._found.take_batch()
        groups = None if found is None else list(dict.fromkeys(each.rollout.group_id for each in found))
        return self._same(expected, groups, "groups of the next batch") and self._agree_on_length()

    def _agree_on_length(self) -> bool:
        known = self._found.state().rollout_length
        expected, found = self._expected.mean_length, float("nan") if known is None else known.mean
        where = f"{self._where}, before batch {self._expected.num_taken}, expected length of a rollout"
        self._differences.near(STAGE, expected, found, EPS * LONGEST, where)
        return abs(expected - found) <= EPS * LONGEST

    def _publish(self) -> None:
        self._expected.version = min(self._expected.version + 1, self._expected.num_taken)
        self._found.update_policy(self._expected.version)

    def _finish_one(self) -> None:
        dispatch = self._inflight.pop(self._generator.randrange(len(self._inflight)))
        replies = [self._generator.randint(1, LONGEST // 2 - len(PROMPT)) for _ in range(2)]
        is_failure = self._generator.random() < FAILS
        self._found.finish(_rollout(dispatch, replies, "it failed" if is_failure else None))
        if is_failure:
            self._expected.fail(dispatch.rollout_id)
        else:
            turns = [len(PROMPT) + size for size in replies]
            self._expected.come_back(
                dispatch.rollout_id, turns, has_signal=has_signal(dispatch.example_index)
            )

    def _resume(self) -> None:
        self._is_resumed = True
        self._inflight.clear()
        snapshot = take_snapshot(self._found.state(), mark=1, rollouts_bytes={})
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)
        self._found = self._scheduler()
        self._found.restore(read.scheduler_state("run"))
        self._found.update_policy(self._expected.version)
        self._expected.resume()
