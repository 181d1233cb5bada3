"""Versions as differences: bytes and time of SmolLM2-135M in bfloat16 over RL-like steps.

Each step is a policy gradient of a few random sequences, some of positive and some of negative advantage, and
AdamW as a run has it by default, on float32 weights; they are published in bfloat16. Weights are those that
`make demo-smollm` leaves in outputs/smollm/model, or random ones of the same shape. Publishing is writing
a version; reading goes over loopback into a cache, is checked, and a model loads it. The network of a
real run is slower than loopback: `at 1 Gbit/s` adds the bytes at that speed.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.result import Result
from benchmarks.shapes import make_llama_135m
from pellucid.config import OptimConfig, SchedulerConfig
from pellucid.trainer.optimizer import Optimizer
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import (
    ServedWeights,
    WeightsCopy,
    publish_version,
    weights_folder,
    write_version,
)
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller

REAL = Path("outputs/smollm/model")
NUM_STEPS = 12
NUM_SEQUENCES, LENGTH = 8, 48
KEY = "a key for this benchmark"
GBIT_BYTES = 125e6


class Version(NamedTuple):
    num_bytes: int
    publish_s: float
    read_s: float


def run() -> list[Result]:
    results = []
    for lr in (1e-6, 1e-5):
        with tempfile.TemporaryDirectory(prefix="pellucid_deltas_") as folder:
            pairs = list(measure(Path(folder), lr))
        whole, delta = (
            Version(*(median(values) for values in zip(*versions, strict=True)))
            for versions in zip(*pairs, strict=True)
        )
        largest = max(delta.num_bytes / whole.num_bytes for whole, delta in pairs)
        name = f"lr {lr:g}:"
        results += [
            Result(f"{name} bytes of a version", delta.num_bytes / 1e6, whole.num_bytes / 1e6, "MB", "whole"),
            Result(f"{name} largest share of the bytes", 100 * largest, 100, "%", "whole"),
            Result(f"{name} publish", 1e3 * delta.publish_s, 1e3 * whole.publish_s, "ms", "whole"),
            Result(f"{name} read and load, loopback", 1e3 * delta.read_s, 1e3 * whole.read_s, "ms", "whole"),
            Result(f"{name} all of it at 1 Gbit/s", _ms(delta), _ms(whole), "ms", "whole"),
        ]
    return results


def _ms(version: Version) -> float:
    """Returns the time from publishing to serving over a link of 1 Gbit/s."""
    return 1e3 * (version.publish_s + version.read_s + version.num_bytes / GBIT_BYTES)


def measure(folder: Path, lr: float) -> Iterator[tuple[Version, Version]]:
    """Yields each version as it travels whole and as its difference, for the same steps."""
    model_folder = REAL
    if not REAL.exists():
        make_llama_135m(model_folder := folder / "model")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    served = ServedWeights(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16))
    optimizer = Optimizer(model, OptimConfig(lr=lr), SchedulerConfig(), max_steps=NUM_STEPS)
    generator = torch.Generator().manual_seed(0)
    runs = {deltas: folder / f"deltas_{deltas}" for deltas in (False, True)}
    with (
        closing(WeightsOffer(runs[False], "127.0.0.1", 0, KEY)) as whole,
        closing(WeightsOffer(runs[True], "127.0.0.1", 0, KEY)) as other,
    ):
        offers = {False: whole, True: other}
        pullers = {}
        for deltas, offer in offers.items():
            offer.start()
            pullers[deltas] = WeightsPuller(
                OfferClient(f"http://127.0.0.1:{offer.port}", KEY), folder / f"cache_{deltas}"
            )
        for version in range(1, NUM_STEPS + 2):
            if version > 1:
                step(model, optimizer, generator)
            copy = WeightsCopy(model, torch.bfloat16)
            copy.take()
            found = {
                deltas: travel(runs[deltas], copy, pullers[deltas], served, version, deltas=deltas)
                for deltas in (False, True)
            }
            if version > 1:
                yield found[False], found[True]


def step(model: nn.Module, optimizer: Optimizer, generator: torch.Generator) -> None:
    tokens = torch.randint(0, 49152, (NUM_SEQUENCES, LENGTH), generator=generator)
    advantages = torch.randn(NUM_SEQUENCES, generator=generator)
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    (-(advantages[:, None] * logprobs).sum() / logprobs.numel()).backward()
    optimizer.step()


def travel(
    run_dir: Path,
    copy: WeightsCopy,
    puller: WeightsPuller,
    served: ServedWeights,
    version: int,
    *,
    deltas: bool,
) -> Version:
    started, before = time.perf_counter(), puller.num_bytes
    publish_version(run_dir, version, partial(write_version, copy), keep=2, deltas=deltas)
    published = time.perf_counter()
    served.load(puller.pull(version))
    ended = time.perf_counter()
    digests = read_digests(weights_folder(run_dir, version))
    assert digests is not None and served.digests() == digests.tensors
    return Version(puller.num_bytes - before, published - started, ended - published)
