"""What alarms cost: CPU time in their calls, against all of a training step, in one process on one thread.

A step is that of the trainer on the demo's model. Calls are timed where the trainer makes them; the tensors
that are looked at change from step to step, so that the mean of many counts, and of the steps the fastest: a
busy machine slows both down. For the orchestrator, the requests of a step with and without its eye on them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import structs

from benchmarks.result import Result
from benchmarks.training import SHAPES, Shape, training_site
from pellucid.data import Completion
from pellucid.inference.client import Account, InferenceClient, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.orchestrator.alarms import OrchestratorAlarms, WatchedClient
from pellucid.trainer.alarms import StepWatch, TrainerAlarms
from pellucid.trainer.update_watch import UpdateWatch

CALLS: Sequence[tuple[type, str]] = (
    (StepWatch, "__init__"),
    (StepWatch, "add"),
    (StepWatch, "watched"),
    (TrainerAlarms, "judge"),
    (UpdateWatch, "before"),
    (UpdateWatch, "after"),
)
NUM_STEPS = 64
MODEL = "tiny"


def run() -> list[Result]:
    return [_training(), _requests()]


def _training() -> Result:
    with training_site(MODEL) as site, clocked(CALLS) as spent:
        training = site.training("alarms")
        steps, calls = [], []
        for _ in range(1 + NUM_STEPS):
            spent.clear()
            started = time.thread_time()
            training.step()
            steps.append(time.thread_time() - started)
            calls.append(sum(spent))
    step_s = median(steps[1:])
    call_s = median(_windows(calls[1:], 32))
    return Result(f"alarms, a step of {MODEL}", step_s, step_s - call_s, "CPU s/step", "without their calls")


def _windows(values: Sequence[float], size: int) -> list[float]:
    """Means of `size` values in a row: every tensor has its turn in each."""
    return [sum(values[start : start + size]) / size for start in range(0, len(values) - size + 1, 4)]


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


class Certain(FakeInferenceClient):
    """Says the same every time, and that nothing else could be said."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        answer = await super().generate(prompt_ids, params, account, request_id)
        return structs.replace(answer, logprobs=[0.0] * len(answer.token_ids))


def _requests() -> Result:
    shape = SHAPES[MODEL]
    client = Certain(lambda prompt, generator: [7] * generator.randint(*shape.completion))
    with TemporaryDirectory() as name:
        watched = WatchedClient(client, OrchestratorAlarms(Path(name), lambda: 0, seed=0))
        times = [[_cpu_s(each, shape) for each in (watched, client)] for _ in range(NUM_STEPS)]
    ours, baseline = map(min, zip(*times, strict=True))
    number = shape.num_groups * shape.members
    return Result(f"alarms, {number} requests", ours, baseline, "CPU s", "no eye on them")


def _cpu_s(client: InferenceClient, shape: Shape) -> float:
    started = time.thread_time()
    _sample(client, shape)
    return time.thread_time() - started


def _sample(client: InferenceClient, shape: Shape) -> None:
    async def groups() -> None:
        for group in range(shape.num_groups):
            prompt = [5] * shape.prompt[0]
            names = [f"run/g{group}/g{group}-r{member}/0" for member in range(shape.members)]
            await asyncio.gather(
                *(client.generate(prompt, SamplingParams(max_tokens=16), Account(), name) for name in names)
            )

    asyncio.run(groups())
