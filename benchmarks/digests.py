"""The cost of digests in publishing and serving a version of SmolLM2-135M's shape.

    python benchmarks/digests.py

Random weights, one process; the minimum of several rounds. Files are written to a temporary folder and read
from the system's cache. `write` includes the digests beside it; `load` does not.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.shapes import make_llama_135m
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import ServedWeights, WeightsCopy, digest_of, named_weights, write_version


def fastest_ms(work: Callable[[], object], rounds: int) -> float:
    """Returns the time of the fastest round, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * min(times[1:])


def measure(dtype: torch.dtype, rounds: int) -> tuple[float, float, float, float]:
    """Returns milliseconds: writing a version, its digests, loading it, digests of what is served."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_llama_135m(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
        weights = named_weights(model)
        copy = WeightsCopy(model)
        copy.take()
        own = fastest_ms(lambda: [digest_of(each) for each in weights.values()], rounds)
        write = fastest_ms(lambda: write_version(copy, folder), rounds)
        served = ServedWeights(model)
        load = fastest_ms(lambda: served.load(folder), rounds)
        found = fastest_ms(served.digests, rounds)
        published = read_digests(folder)
        assert published is not None and served.digests() == published.tensors
    return write, own, load, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print("dtype     write ms  digests ms  share    load ms  digests ms  ratio")
    for dtype in (torch.float32, torch.bfloat16):
        write, own, load, found = measure(dtype, rounds)
        name, share = str(dtype).removeprefix("torch."), own / write
        print(
            f"{name:<9} {write:8.0f} {own:11.0f} {share:6.0%} {load:10.0f} {found:11.0f} {found / load:6.2f}"
        )


if __name__ == "__main__":
    main()
