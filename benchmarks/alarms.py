"""What alarms cost: CPU time in their calls, against all of a training step, in one process on one thread.

A step is that of the trainer on the demo's model, on a batch that is decoded anew each time and whose tokens
have two policy versions. Calls are timed where the trainer makes them, on caches that the step has filled
with other things. What is looked at changes from step to step, so the mean of 32 steps in a row counts: among
the first ones, all of which are watched, and later.

The orchestrator's part is the requests of a step with and without its eye on them, answered by a client that
decodes each reply and does nothing else, and one reward scored again. Both parts together are compared with
the trainer's step as well: the orchestrator is a process of its own.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.result import Result
from benchmarks.training import SHAPES, Shape, training_site
from pellucid.data import Completion, Rollout, TrainingSample, Turn
from pellucid.inference.client import Account, InferenceClient, SamplingParams
from pellucid.ledger import Flow
from pellucid.orchestrator.alarms import OrchestratorAlarms, WatchedClient
from pellucid.orchestrator.built_in import ReverseText
from pellucid.orchestrator.verdict import Verdict
from pellucid.trainer.alarms import ALL_UNTIL_STEP, StepWatch, TrainerAlarms, UpdateWatch

CALLS: Sequence[tuple[type, str]] = (
    (StepWatch, "__init__"),
    (StepWatch, "add"),
    (StepWatch, "sums"),
    (TrainerAlarms, "judge"),
    (UpdateWatch, "before"),
    (UpdateWatch, "after"),
)
WINDOW = 32
"""Steps in which every tensor has its turn."""

NUM_WINDOWS = 3
NUM_REPEATS = 64
NUM_FIRST_TOKENS = 16
MODEL = "tiny"


def run() -> list[Result]:
    first, later = _training()
    requests, reward_s = _requests(), _reward_s()
    orchestrator_s = requests.ours - requests.baseline + reward_s
    whole = Result(
        f"alarms, trainer and orchestrator, a step of {MODEL}",
        later.ours + orchestrator_s,
        later.baseline,
        "CPU s/step",
        "the trainer without its calls",
    )
    return [first, later, requests, whole]


def _training() -> list[Result]:
    """Measures one of the first steps, and one of those after them."""
    with training_site(MODEL) as site, clocked(CALLS) as spent:
        training = site.training("alarms")
        steps, calls = [], []
        for _ in range(ALL_UNTIL_STEP + NUM_WINDOWS * WINDOW):
            spent.clear()
            started = time.thread_time()
            training.step()
            steps.append(time.thread_time() - started)
            calls.append(sum(spent))
    step_s, early = median(steps[1:]), ALL_UNTIL_STEP - 1
    results = []
    for which, own in (("one of the first steps", calls[1:early]), ("a step", calls[early:])):
        size = min(WINDOW, len(own))
        call_s = median(sum(own[start : start + size]) / size for start in range(len(own) - size + 1))
        name = f"alarms, {which} of {MODEL}"
        results.append(Result(name, step_s, step_s - call_s, "CPU s/step", "without their calls"))
    return results


@contextmanager
def clocked(calls: Sequence[tuple[type, str]]) -> Iterator[list[float]]:
    """The CPU time of each call of these methods, until the end of the block."""
    spent: list[float] = []
    kept = [(owner, name, getattr(owner, name)) for owner, name in calls]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments, **keywords)
            finally:
                spent.append(time.thread_time() - started)

        return call

    for owner, name, method in kept:
        setattr(owner, name, timed(method))
    try:
        yield spent
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


class PromptClient:
    """A client that decodes its answers: one of a few first tokens, which are equally likely."""

    wait_until_ready = watch = score = abort = close = None  # never called here

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers
        self._random = random.Random(0)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        await asyncio.sleep(0)
        return msgspec.json.decode(self._random.choice(self._answers), type=Completion)


def _answers(num_tokens: int) -> list[bytes]:
    """They differ in their first token."""
    logprobs = [-math.log(NUM_FIRST_TOKENS), *[0.0] * (num_tokens - 1)]
    rest = [7] * (num_tokens - 1)
    return [
        msgspec.json.encode(Completion([first, *rest], logprobs, [(0, num_tokens)], "stop"))
        for first in range(NUM_FIRST_TOKENS)
    ]


def _requests() -> Result:
    shape = SHAPES[MODEL]
    client: Any = PromptClient(_answers(shape.completion[1]))
    with TemporaryDirectory() as name:
        watched = WatchedClient(client, OrchestratorAlarms(Path(name), lambda: 0, seed=0))
        times = [[_cpu_s(each, shape, step) for each in (watched, client)] for step in range(NUM_REPEATS)]
    ours, baseline = map(min, zip(*times, strict=True))
    number = shape.num_groups * shape.members
    return Result(f"alarms, {number} requests", ours, baseline, "CPU s", "no eye on them")


def _reward_s() -> float:
    """CPU time of judging a batch: an answer of the demo is scored once more."""
    environment = ReverseText(seed=0)
    example, text = environment.example(0), "an answer"
    reward = environment.reward(example, text).reward
    rollout = Rollout("g0-r0", "g0", example, "reverse-text", 1.0, reward=reward)
    rollout.turns.append(Turn([5], Completion([6], [-1.0], [(0, 1)], "stop"), text))
    sample = TrainingSample.from_turn([5], [6], [-1.0], env_name="reverse-text", reward=reward)
    verdicts = [Verdict(rollout, Flow.SENT, "", 0.5, [sample])]
    times = []
    with TemporaryDirectory() as name:
        alarms = OrchestratorAlarms(Path(name), lambda: 0, seed=0)
        for _ in range(NUM_REPEATS):
            started = time.thread_time()
            metrics = alarms.judge_batch(verdicts, {"reverse-text": environment})
            times.append(time.thread_time() - started)
    assert not any(metrics.values())
    return min(times)


def _cpu_s(client: InferenceClient, shape: Shape, step: int) -> float:
    started = time.thread_time()
    asyncio.run(_sample(client, shape, step))
    return time.thread_time() - started


async def _sample(client: InferenceClient, shape: Shape, step: int) -> None:
    for group in range(step * shape.num_groups, (step + 1) * shape.num_groups):
        prompt = [5] * shape.prompt[0]  # one object, as a session has it
        names = [f"run/g{group}/g{group}-r{member}/0" for member in range(shape.members)]
        await asyncio.gather(
            *(client.generate(prompt, SamplingParams(max_tokens=16), Account(), name) for name in names)
        )
