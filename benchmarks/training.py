"""Whole training steps, as benchmarks repeat them: the trainer is given one batch again and again.

A step is everything between two batches but publishing weights and checkpoints: packing, forward, loss,
backward, clipping, AdamW, metrics and their file.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.shapes import MAKERS
from pellucid.config import ModelConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.model.load import vocab_size
from pellucid.trainer.batches import BatchSource
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate
from pellucid.transport import Batch, decode_batch, encode_batch

LR, MAX_NORM, CLIP = 1e-5, 1.0, 0.2
_ENDLESS = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups, members of each, and from–to of the tokens that a prompt and a completion have."""

    num_groups: int
    members: int
    prompt: tuple[int, int]
    completion: tuple[int, int]


SHAPES = {"tiny": Shape(16, 8, (21, 29), (5, 9)), "135M": Shape(2, 4, (48, 64), (16, 48))}
"""By model: the demo's shape, and one that a core trains in seconds."""


def draw_table(shape: Shape, vocab_size: int) -> TokenTable:
    """A batch of one step. The models are untrained: any token is about as likely as any other."""
    generator = np.random.default_rng(0)
    samples = []
    for group in range(shape.num_groups):
        prompt = generator.integers(5, vocab_size, generator.integers(*shape.prompt, endpoint=True))
        rewards = generator.integers(0, 2, shape.members).astype(np.float32)
        rewards[:2] = 0, 1  # no group without a signal
        for member, reward in enumerate(rewards.tolist()):
            length = int(generator.integers(*shape.completion, endpoint=True))
            samples.append(
                TrainingSample.from_turn(
                    prompt,
                    generator.integers(5, vocab_size, length),
                    generator.normal(-math.log(vocab_size), 0.1, length).astype(np.float32),
                    env_name="bench",
                    run_id="bench",
                    group_id=f"g{group}",
                    rollout_id=f"g{group}-r{member}",
                    reward=reward,
                    advantage=reward - float(rewards.mean()),
                    policy_versions=member % 2,
                    stop_reason="stop" if member % 4 else "length",
                )
            )
    return TokenTable.from_samples(samples)


class RepeatedBatch(BatchSource):
    """One batch again and again, decoded anew for each step: nothing of it is inflated or cached."""

    def __init__(self, table: TokenTable) -> None:
        self._payload = encode_batch(Batch("bench", 0, table))

    def next(self, step: int) -> Batch:
        return decode_batch(self._payload, sender="bench")


@dataclass(frozen=True, slots=True)
class Steps:
    """What was measured of steps, one after the other; a sink of the trainer's reports."""

    times_s: list[float] = field(default_factory=list)
    reports: list[Mapping[str, float]] = field(default_factory=list)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.reports.append(values)

    def close(self) -> None:
        """They are read afterwards."""

    @property
    def fastest_s(self) -> float:
        """Noise only ever adds time; the first step pays for memory that the others find."""
        return min(self.times_s[1:])

    @property
    def typical_s(self) -> float:
        """The median: what differs by a percent needs more than one of many."""
        return median(self.times_s[1:])


class Training:
    """The trainer on one batch, all of it in one micro batch, on one thread."""

    def __init__(self, model: Path, table: TokenTable, folder: Path, **trainer: Any) -> None:
        config = TrainerRunConfig.model_validate(
            {
                "output_dir": folder,
                "model": {"name": str(model), "dtype": "float32"},
                "max_steps": _ENDLESS,
                "seq_len": table.num_tokens,
                "trainer": {
                    "threads": 1,
                    "loss": {"type": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP, "kl_tau": 0.0},
                    "optim": {"lr": LR, "weight_decay": 0.0, "max_norm": MAX_NORM},
                    "ckpt": {"interval": _ENDLESS},
                    **trainer,
                },
            }
        )
        self.steps = Steps()
        self.run = build_run(config, RepeatedBatch(table), None, [self.steps])

    def step(self) -> None:
        # From step 1 on: the batch has tokens of version 1.
        run, step, started = self.run, 1 + len(self.steps.times_s), time.perf_counter()
        observer = accumulate(run, run.next_batch(step))
        run.finish(step, observer, run.update(observer))
        self.steps.times_s.append(time.perf_counter() - started)

    def close(self) -> None:
        self.run.close()


@dataclass(frozen=True, slots=True)
class Site:
    """Where a model is trained in several ways on the same batch; gone afterwards."""

    folder: Path
    weights: Path
    table: TokenTable
    _open: ExitStack

    def training(self, name: str, **trainer: Any) -> Training:
        """With settings of the trainer."""
        return self._open.enter_context(
            closing(Training(self.weights, self.table, self.folder / name, **trainer))
        )


@contextmanager
def training_site(model: str) -> Iterator[Site]:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        weights = folder / "model"
        MAKERS[model](weights)
        table = draw_table(SHAPES[model], vocab_size(ModelConfig(name=str(weights))))
        yield Site(folder, weights, table, stack)
