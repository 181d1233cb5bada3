"""Versions as differences: bytes and time of SmolLM2-135M in bfloat16 over 50 steps of RL.

Trains `benchmarks/deltas.toml` at two learning rates, into `outputs/deltas` (14 GB, 15 minutes each on two
cores); a run that is there already is taken as it is. Then every version of it is published once more, read
and loaded, whole and as its difference by turns: publishing is writing it, reading goes over loopback into a
cache, is checked, and a model loads it. A network is slower than loopback: `at N Gbit/s` adds the bytes at
that speed, as if nothing else went on meanwhile.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import zstandard
from safetensors.numpy import load
from transformers import AutoModelForCausalLM

from benchmarks.result import Result
from pellucid.data.tokenizer import quiet_transformers
from pellucid.errors import MissingPackageError
from pellucid.transport import is_stable
from pellucid.transport.deltas import DELTA
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

MODEL = Path("outputs/smollm/model")
RUNS = Path("outputs/deltas")
NUM_STEPS = 50
KEY = "a key for this benchmark"
GBIT_BYTES = 125e6


class Version(NamedTuple):
    """A version on its way to a server."""

    num_bytes: float
    publish_s: float
    read_s: float


def run() -> list[Result]:
    if not MODEL.exists():
        raise MissingPackageError(
            f"{MODEL} is missing; write it by examples/smollm/prepare.py outputs/smollm"
        )
    return [result for lr in ("1e-06", "1e-05") for result in results_of(train(lr), f"lr {lr}:")]


def train(lr: str) -> Path:
    """Returns the folder of a run that has ended; goes on with one that has not."""
    folder = RUNS / f"lr_{lr}"
    if not is_stable(weights_folder(folder, NUM_STEPS)):
        flags = ("--output-dir", str(folder), "--trainer.optim.lr", lr, "--resume")
        command = [sys.executable, "-m", "pellucid.cli", "rl", "@", "benchmarks/deltas.toml", *flags]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def results_of(run_dir: Path, name: str) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="pellucid_deltas_") as folder:
        pairs = list(measure(run_dir, Path(folder)))
    whole, delta = (typical(versions) for versions in zip(*pairs, strict=True))
    largest = max(delta.num_bytes / whole.num_bytes for whole, delta in pairs)
    changed = 100 * median(share_changed(run_dir, version) for version in range(2, NUM_STEPS + 1))
    return [
        Result(f"{name} elements changed", changed, 100, "%", "all"),
        Result(f"{name} bytes of a version", delta.num_bytes / 1e6, whole.num_bytes / 1e6, "MB", "whole"),
        Result(f"{name} largest share of the bytes", 100 * largest, 100, "%", "whole"),
        Result(f"{name} publish", 1e3 * delta.publish_s, 1e3 * whole.publish_s, "ms", "whole"),
        Result(f"{name} read and load, loopback", 1e3 * delta.read_s, 1e3 * whole.read_s, "ms", "whole"),
        Result(f"{name} all at 1 Gbit/s", _ms(delta, 1), _ms(whole, 1), "ms", "whole"),
        Result(f"{name} all at 10 Gbit/s", _ms(delta, 10), _ms(whole, 10), "ms", "whole"),
    ]


def _ms(version: Version, gbits: float) -> float:
    """Returns the time from publishing to serving over a link of so many Gbit/s."""
    return 1e3 * (version.publish_s + version.read_s + version.num_bytes / (gbits * GBIT_BYTES))


def typical(versions: Sequence[Version]) -> Version:
    """Returns the median of the bytes, and the fastest of the times: other work adds to them."""
    num_bytes, publish_s, read_s = zip(*versions, strict=True)
    return Version(median(num_bytes), min(publish_s), min(read_s))


def share_changed(run_dir: Path, version: int) -> float:
    """Returns the share of a version's elements, of two bytes each, that its difference changes."""
    folder = weights_folder(run_dir, version)
    parts = load(zstandard.decompress((folder / DELTA).read_bytes()))
    num_bytes = sum(len(part) for name, part in parts.items() if name.endswith(".changes"))
    return num_bytes / sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(run_dir: Path, folder: Path) -> Iterator[tuple[Version, Version]]:
    """Yields each version of a run but the first, as it travels whole and as its difference."""
    quiet_transformers()
    trained, served = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16) for _ in range(2))
    runs = {deltas: folder / f"deltas_{deltas}" for deltas in (False, True)}
    with (
        closing(WeightsOffer(runs[False], "127.0.0.1", 0, KEY)) as whole,
        closing(WeightsOffer(runs[True], "127.0.0.1", 0, KEY)) as other,
    ):
        pullers = {}
        for deltas, offer in ((False, whole), (True, other)):
            offer.start()
            client = OfferClient(f"http://127.0.0.1:{offer.port}", KEY)
            pullers[deltas] = WeightsPuller(client, folder / f"cache_{deltas}")
        for version in range(1, NUM_STEPS + 1):
            ServedWeights(trained).load(weights_folder(run_dir, version))
            copy = WeightsCopy(trained, torch.bfloat16)
            copy.take()
            found = {
                deltas: travel(
                    runs[deltas], copy, pullers[deltas], ServedWeights(served), version, deltas=deltas
                )
                for deltas in (version % 2 == 0, version % 2 == 1)
            }
            if version > 1:
                yield found[False], found[True]


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
