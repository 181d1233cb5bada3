"""Does a part of a run grow with its steps, and what does it cost that its files survive a power failure?

- Resident memory of this process after 2,000 steps against after 200: the orchestrator's loop with its books,
  snapshots and files; the trainer with its metrics and checkpoints; the engine behind its thread and journal.
  Each is alone; what the others would do is made up.
- A step with `fsync` against one without, in the same process, taking turns, the fastest of several runs. The
  orchestrator gets answers at an even rate, which makes a batch of 128 rollouts in the time of a step of the
  demo. The trainer trains the demo's model; it syncs in steps that write a checkpoint, by default every 50th.
- The time that a batch takes to be synced. It passes beside sampling and training, but with
  `max_async_level = 0` the trainer waits for it.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.orchestrator import Coin, Fleet, Nowhere, configure, make_orchestrator, without_warnings
from benchmarks.result import Result
from benchmarks.training import Shape, Training, draw_table, training_site
from pellucid.config import ModelConfig
from pellucid.inference.client import Account, GenerateRequest, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread
from pellucid.ledger import Journal, Stage
from pellucid.metrics import JsonlSink
from pellucid.model import load_policy
from pellucid.model.load import vocab_size
from pellucid.model.tiny import make_tiny_model
from pellucid.transport.weights import publish_version

if TYPE_CHECKING:
    from _typeshed import HasFileno

T = TypeVar("T")

EARLY, NUM_STEPS = 200, 2_000
BATCH_SIZE = 16
SMALL_SHAPE = Shape(num_groups=2, members=4, prompt=(8, 12), completion=(4, 8))
GROUP_SIZE = 8

DEMO_STEP_S = 125 / 400
"""See docs/measurements.md, "Does it learn?"."""

DEMO_BATCH_SIZE = 128
SYNCED_STEPS = 16
CKPT_INTERVAL, MEASURED_INTERVAL = 50, 4


def run() -> list[Result]:
    with without_warnings():
        return [*_growth(), *_syncs()]


# Memory


def _growth() -> Iterator[Result]:
    for part, steps in PARTS.items():
        early, late = growth(steps, EARLY, NUM_STEPS, resident_mib)
        yield Result(f"endurance, {part}, {NUM_STEPS:,} steps", late, early, "MiB resident", f"{EARLY}")


Part = Callable[[int, Callable[[int], None]], None]
"""Makes so many steps and calls back with the number of each."""


def growth(part: Part, early: int, late: int, measure: Callable[[], T]) -> tuple[T, T]:
    """Measures after so many steps, and after so many."""
    measured = {}

    def note(step: int) -> None:
        if step + 1 in (early, late):
            measured[step + 1] = measure()

    part(late, note)
    return measured[early], measured[late]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class QuickTrainer(Nowhere):
    """Has trained every batch at once, tells its step, and publishes weights that nobody reads."""

    def __init__(self, folder: Path, note: Callable[[int], None]) -> None:
        super().__init__()
        self._folder = folder
        self._note = note

    def send(self, step: int, payload: bytes) -> None:
        self._note(step)
        publish_version(self._folder, step + 1, lambda folder: None, keep=2)


def orchestrate(num_steps: int, note: Callable[[int], None]) -> None:
    """Batches of 16 rollouts with 8 tokens; the servers answer almost at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configure(folder, BATCH_SIZE, num_steps, BATCH_SIZE, num_tokens=8, max_async_level=1)
        trainer = QuickTrainer(folder, note)
        asyncio.run(make_orchestrator(config, Coin(seed=0), Fleet(mean_s=0.001), trainer).run())


def train(num_steps: int, note: Callable[[int], None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_tiny_model(model, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
        table = draw_table(SMALL_SHAPE, vocab_size(ModelConfig(name=str(model))))
        ckpt = {"interval": CKPT_INTERVAL}
        with closing(Training(model, table, Path(name) / "run", ckpt=ckpt)) as training:
            for step in range(num_steps):
                training.step()
                training.steps.reports.clear()
                note(step)


def sample(num_steps: int, note: Callable[[int], None]) -> None:
    """A group of 8 requests that share a prompt of 16 tokens and sample 8 each, after the other."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_tiny_model(model, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
        engine = Engine(load_policy(ModelConfig(name=str(model))), num_slots=GROUP_SIZE, max_length=32)
        journal = Journal(Path(name) / "inference.jsonl", Stage.INFERENCE)
        thread = EngineThread(engine, journal, JsonlSink(Path(name) / "metrics.jsonl"), _raise)
        thread.start()
        try:
            asyncio.run(_ask(thread, num_steps, note))
        finally:
            thread.stop()


async def _ask(thread: EngineThread, num_steps: int, note: Callable[[int], None]) -> None:
    for step in range(num_steps):
        params = [SamplingParams(max_tokens=8, seed=GROUP_SIZE * step + n) for n in range(GROUP_SIZE)]
        prompt = [5 + step % 50] * 16
        account = Account("run", "env")
        asked = [GenerateRequest(prompt, each, account, f"{step}-{n}") for n, each in enumerate(params)]
        async for _ in thread.generate(asked):
            pass
        note(step)


def _raise(error: BaseException) -> None:
    raise error


PARTS: dict[str, Part] = {"orchestrator": orchestrate, "trainer": train, "engine": sample}


# Syncs


def _syncs() -> list[Result]:
    cpu_ms, elapsed_ms = sync_cost()
    sampled, trained = compare(_batch_s), _compare_training()
    step_ms = 1e3 * DEMO_STEP_S
    return [
        Result("endurance, orchestrator, a step", *sampled, "s", "without syncs"),
        Result("endurance, trainer, a step of the demo's model", *trained, "s", "without syncs"),
        Result("endurance, orchestrator, CPU time of syncs per batch", cpu_ms, step_ms, "ms", "a demo step"),
        Result("endurance, orchestrator, syncs per batch, beside", elapsed_ms, step_ms, "ms", "a demo step"),
    ]


def compare(step_s: Callable[[], float], repeats: int = 3) -> tuple[float, float]:
    """The fastest of several measurements each, with syncs and without."""
    synced, unsynced = [], []
    for _ in range(repeats):
        synced.append(step_s())
        with syncing_by(_not_at_all):
            unsynced.append(step_s())
    return min(synced), min(unsynced)


@contextmanager
def syncing_by(sync: "Callable[[int | HasFileno], None]") -> Iterator[None]:
    """Every `fsync` of this process is this one until the end of the block."""
    kept = os.fsync
    os.fsync = sync  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = kept


def _not_at_all(fd: "int | HasFileno") -> None:
    """What the system has not written yet is gone after a power failure."""


class EvenFleet(Fleet):
    """Answers one request after the other, at an even rate: exponential times would hide a percent."""

    def __init__(self, per_s: float) -> None:
        super().__init__(mean_s=1.0)
        self._between_s = 1 / per_s
        self._last_s = 0.0

    def delay_s(self, now_s: float) -> float:
        self._last_s = max(self._last_s + self._between_s, now_s)
        return self._last_s - now_s


def _batch_s() -> float:
    """Seconds between two batches of the orchestrator."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), 2 * DEMO_BATCH_SIZE, SYNCED_STEPS, DEMO_BATCH_SIZE)
        fleet, trainer = EvenFleet(DEMO_BATCH_SIZE / DEMO_STEP_S), Nowhere()
        asyncio.run(make_orchestrator(config, Coin(seed=0), fleet, trainer).run())
    return (trainer.times[-1] - trainer.times[0]) / (len(trainer.times) - 1)


def _compare_training() -> tuple[float, float]:
    """The mean of 49 steps and one with a checkpoint, each as fast as it can be: with syncs, and without."""
    with training_site("tiny") as site:
        training = site.training("checkpoints", ckpt={"interval": MEASURED_INTERVAL})
        times = training.steps.times_s

        def saving_s() -> float:
            for _ in range(MEASURED_INTERVAL):
                training.step()
            return times[-1]

        saving_s()  # whose first step pays for memory that the others find
        synced, unsynced = compare(saving_s, repeats=12)
    plain = min(time for index, time in enumerate(times) if (index + 1) % MEASURED_INTERVAL)
    others = (CKPT_INTERVAL - 1) * plain
    return (others + synced) / CKPT_INTERVAL, (others + unsynced) / CKPT_INTERVAL


def sync_cost(num_steps: int = 50) -> tuple[float, float]:
    """CPU time, and time, that a batch of 128 rollouts takes to be synced, in ms; beside the loop."""
    cpu_s = elapsed_s = 0.0
    sync = os.fsync

    def timed(fd: "int | HasFileno") -> None:
        nonlocal cpu_s, elapsed_s
        cpu, started = time.thread_time(), time.perf_counter()
        sync(fd)
        cpu_s += time.thread_time() - cpu
        elapsed_s += time.perf_counter() - started

    with syncing_by(timed), tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), 2 * DEMO_BATCH_SIZE, num_steps, DEMO_BATCH_SIZE)
        asyncio.run(make_orchestrator(config, Coin(seed=0), Fleet(mean_s=0.01), Nowhere()).run())
    return cpu_s / num_steps * 1e3, elapsed_s / num_steps * 1e3
