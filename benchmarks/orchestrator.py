"""Does the orchestrator keep up with a large fleet, and what do waiting and failing rollouts cost?

- Ten thousand rollouts in flight on servers that answer with 500 tokens: rollouts started, scored and sent
  per second, and how late the event loop is meanwhile. The loop, the books and the files are those of a real
  run; only the servers and the trainer are not there.
- A finished rollout of 30,000 tokens that waits for its batch: what it takes in memory, against its sample.
- One rollout in twenty fails, eight to a group: the share of the successful rollouts' tokens that is sent,
  against dropping a group at any failure, as a group-scored environment has to.
- Tokens of groups that grew too old, against letting them sample to their end; see `staleness`.
"""

import asyncio
import gc
import logging
import random
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from benchmarks.result import Result
from benchmarks.staleness import simulate
from benchmarks.transport import size_in_process
from pellucid.config import DefaultAdvantageConfig, OrchestratorRunConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.inference.client import Account, SamplingParams
from pellucid.ledger import read_journal, sum_entries
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Orchestrator, Score, SingleTurnEnvironment
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.scheduler import Rules, Scheduler, Source
from pellucid.orchestrator.tasks import loop_factory
from pellucid.orchestrator.verdict import Judge
from pellucid.workers import infrequent_gc

NUM_INFLIGHT = 10_000
NUM_TOKENS = 500
BATCH_SIZE = 1_000
GROUP_SIZE = 8
MEAN_ANSWER_S = 8.0
"""With 10,000 in flight the servers answer 1,250 times a second."""

WARM_UP_S, MEASURED_S = 30.0, 20.0
TICK_S = 0.005
REQUIRED_PER_S, ALLOWED_LAG_MS = 1_000.0, 50.0

NUM_WAITING = 16
LONG_TOKENS = 15_000
"""Of the prompt, and of the completion."""

FAILURES = 0.05


class Fleet:
    """Answers each request after a while, with as many tokens as asked for.

    Times are exponential: then a fleet that starts all at once answers evenly, and not in waves.
    """

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s
        self._random = random.Random(0)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._version = 0

    def delay_s(self, now_s: float) -> float:
        """How long an answer to a request takes that comes now."""
        return self._random.expovariate(1 / self._mean_s)

    async def wait_until_ready(self) -> None:
        """Always."""

    async def watch(self) -> None:
        await asyncio.Event().wait()  # nothing to see

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        loop = asyncio.get_running_loop()
        answered = self._waiting[request_id] = loop.create_future()
        loop.call_later(self.delay_s(loop.time()), _resolve, answered)
        await answered
        del self._waiting[request_id]
        number = params.max_tokens
        # Nothing else could be said: otherwise the first tokens of a group would be too much alike.
        return Completion([7] * number, [0.0] * number, [(self._version, number)], "stop")

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        raise NotImplementedError("nobody teaches here")

    async def update_weights(self, version: int, folder: Path) -> None:
        self._version = version

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._waiting:
                _resolve(self._waiting[request_id])

    async def close(self) -> None:
        """Nothing to close."""


def _resolve(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)


class Coin(SingleTurnEnvironment):
    """Rewards at random; fails with a probability."""

    repeatable_reward: ClassVar[bool] = False

    def __init__(self, *, seed: int, failures: float = 0.0) -> None:
        super().__init__(seed=seed)
        self._random = random.Random(seed)
        self._failures = failures

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"{index}"}])

    def reward(self, example: Example, text: str) -> Score:
        if self._random.random() < self._failures:
            raise ValueError("an injected failure")
        return Score(self._random.random())


class GroupCoin(Coin):
    requires_group_scoring: ClassVar[bool] = True

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        return [Score(self._random.random()) for _ in rollouts]


class Nowhere:
    """Takes every batch and notes when."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def send(self, step: int, payload: bytes) -> None:
        self.times.append(time.perf_counter())

    def check(self) -> None:
        """Nothing is refused."""

    def close(self) -> None:
        """Nothing to close."""


def run() -> list[Result]:
    held, sample = waiting_bytes()
    stale = simulate()
    with without_warnings():  # of every failure, and of what is cut short at the end
        rate, lag_ms = under_load()
        kept = share_sent(Coin(seed=0, failures=FAILURES))
        kept_whole = share_sent(GroupCoin(seed=0, failures=FAILURES))
    name = f"orchestrator, {NUM_INFLIGHT:,} in flight"
    dropping = "dropping a group at any failure"
    return [
        Result(f"{name}, finished", rate, REQUIRED_PER_S, "rollouts/s", "at least"),
        Result(f"{name}, event-loop lag p99", lag_ms, ALLOWED_LAG_MS, "ms", "at most"),
        Result("orchestrator, 30,000-token rollout that waits", held, sample, "bytes", "its sample"),
        Result("orchestrator, tokens sent at 5% failures", kept, kept_whole, "share", dropping),
        Result(
            "orchestrator, tokens of groups that grew too old",
            stale.num_stale,
            stale.num_stale + stale.num_saved,
            "tokens",
            "sampling to the end",
        ),
    ]


@contextmanager
def without_warnings() -> Iterator[None]:
    log = logging.getLogger("pellucid.orchestrator")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def under_load() -> tuple[float, float]:
    """Rollouts per second, and the 99th percentile of the lag in milliseconds."""
    with tempfile.TemporaryDirectory() as name, infrequent_gc():
        config = configure(Path(name), NUM_INFLIGHT, num_steps=1_000_000, batch_size=BATCH_SIZE)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            times, lags = runner.run(_watch(config))
    return BATCH_SIZE * (len(times) - 1) / (times[-1] - times[0]), 1000 * sorted(lags)[int(0.99 * len(lags))]


async def _watch(config: OrchestratorRunConfig) -> tuple[list[float], list[float]]:
    """When batches were sent, once all are in flight; how late the loop was, from the first start on."""
    lags: list[float] = []
    trainer = Nowhere()
    orchestrator = make_orchestrator(config, Coin(seed=0), Fleet(MEAN_ANSWER_S), trainer)
    running, ticking = asyncio.create_task(orchestrator.run()), asyncio.create_task(_tick(lags))
    await asyncio.sleep(WARM_UP_S)
    num_before = len(trainer.times)
    await asyncio.sleep(MEASURED_S)
    times = trainer.times[num_before:]
    for task in (ticking, running):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return times, lags


async def _tick(lags: list[float]) -> None:
    """Every tick that falls into a pause is late, not only the one that ends it."""
    due = time.perf_counter()
    while True:
        due += TICK_S
        await asyncio.sleep(due - time.perf_counter())
        now = time.perf_counter()
        while due + TICK_S <= now:
            lags.append(now - due)
            due += TICK_S
        lags.append(now - due)


def waiting_bytes() -> tuple[float, float]:
    """Of a rollout that waits for its batch, as `tracemalloc` sees it, and of its sample."""
    rules = Rules(NUM_WAITING + 1, GROUP_SIZE, NUM_WAITING, 1, 1, 1)
    judge = Judge("bench", load_advantage(DefaultAdvantageConfig()), filter_zero_advantages=False)
    scheduler = Scheduler(rules, [Source("env")], judge)
    generator = random.Random(0)
    tracemalloc.start()
    try:
        before = _traced_bytes()
        for _ in range(NUM_WAITING):
            dispatch = scheduler.next_dispatch()
            assert dispatch is not None
            scheduler.finish(_long_rollout(dispatch.group_id, dispatch.rollout_id, generator))
        held = (_traced_bytes() - before) / NUM_WAITING
    finally:
        tracemalloc.stop()
    [sample] = scheduler.state().ready[0][0].samples
    return held, float(size_in_process(sample))


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _long_rollout(group_id: str, rollout_id: str, generator: random.Random) -> Rollout:
    """As a session records it: every id and logprob an object of its own, words of four letters as text."""
    prompt_ids = [generator.randrange(150_000) for _ in range(LONG_TOKENS)]
    token_ids = [generator.randrange(150_000) for _ in range(LONG_TOKENS)]
    logprobs = [-generator.random() for _ in range(LONG_TOKENS)]
    text = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
    completion = Completion(token_ids, logprobs, [(0, LONG_TOKENS)], "stop")
    spans = [("user", 0, LONG_TOKENS), ("assistant", LONG_TOKENS, 2 * LONG_TOKENS)]
    turn = Turn(prompt_ids, completion, text, spans)
    example = Example(group_id, [{"role": "user", "content": group_id}])
    return Rollout(rollout_id, group_id, example, "env", 1.0, [turn], reward=generator.random())


_WORDS = ("that", "with", "have", "this", "will", "your", "from", "they", "know", "want", "been", "good")


def share_sent(environment: Coin) -> float:
    """Of the tokens of rollouts that did not fail, the share that is sent."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), num_inflight=256, num_steps=20, batch_size=128)
        asyncio.run(make_orchestrator(config, environment, Fleet(mean_s=0.01), Nowhere()).run())
        [total] = sum_entries(read_journal(Path(name) / "ledger" / "orchestrator.jsonl"))
    counts = total.counts
    successful = counts["received"] - counts.get("failed_rollout", 0) - counts.get("cancelled", 0)
    return counts["sent"] / successful


def make_orchestrator(
    config: OrchestratorRunConfig, environment: Coin, fleet: Fleet, trainer: Nowhere
) -> Orchestrator:
    return Orchestrator(config, {"coin": environment}, character_tokenizer(), fleet, trainer)


def configure(
    folder: Path,
    num_inflight: int,
    num_steps: int,
    batch_size: int,
    *,
    num_tokens: int = NUM_TOKENS,
    max_async_level: int | None = None,
) -> OrchestratorRunConfig:
    """`num_tokens`: what a rollout samples. `max_async_level`: default: it never waits for its trainer."""
    return OrchestratorRunConfig.model_validate(
        {
            "output_dir": folder,
            "model": {"name": "none"},
            "max_steps": num_steps,
            "max_async_level": num_steps if max_async_level is None else max_async_level,
            "seq_len": 2048,
            "transport": {"type": "filesystem", "hwm": num_steps + 1},
            "orchestrator": {
                "env": [{"id": "benchmarks.orchestrator:Coin", "name": "coin"}],
                "batch_size": batch_size,
                "rollouts_per_example": GROUP_SIZE,
                "max_inflight_rollouts": num_inflight,
                "max_off_policy_steps": num_steps,
                "filter_zero_advantages": False,
                "sampling": {"max_tokens": num_tokens},
            },
        }
    )
