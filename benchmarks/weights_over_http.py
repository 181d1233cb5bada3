"""How fast servers read a version of SmolLM2-135M's size from the trainer on loopback, one and three at once.

    python benchmarks/weights_over_http.py

Random numbers of 538 MB in one file. The trainer's listener is a thread of this process, the readers are
processes of their own; `cpu` is the time that this process computes meanwhile, which training could need.
The fastest of several rounds.
"""

import argparse
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from pellucid.transport.weights import publish_version, write_version
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller

KEY = "a key for this benchmark"
NUM_TENSORS, TENSOR_SHAPE = 30, (2048, 2190)


def pull(port: int, cache: Path) -> None:
    WeightsPuller(OfferClient(f"http://127.0.0.1:{port}", KEY), cache).pull(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    tensors = [nn.Parameter(torch.randn(TENSOR_SHAPE)) for _ in range(NUM_TENSORS)]
    model = nn.ParameterList(tensors)
    num_bytes = sum(each.nbytes for each in tensors)
    with (
        tempfile.TemporaryDirectory() as name,
        closing(WeightsOffer(Path(name), "127.0.0.1", 0, KEY)) as offer,
        ProcessPoolExecutor(3, mp_context=get_context("spawn")) as readers,
    ):
        offer.start()
        publish_version(Path(name), 1, partial(write_version, model), keep=1)
        print("readers  seconds   MB/s of all  cpu seconds of the trainer's process")
        for num_readers in (1, 3):
            found = []
            for _ in range(rounds + 1):
                caches = [Path(name) / f"cache_{number}" for number in range(num_readers)]
                started, cpu = time.perf_counter(), time.process_time()
                list(readers.map(partial(pull, offer.port), caches))
                found.append((time.perf_counter() - started, time.process_time() - cpu))
                for cache in caches:
                    shutil.rmtree(cache)
            seconds, cpu_s = min(found[1:])
            speed = num_readers * num_bytes / 1e6 / seconds
            print(f"{num_readers:7} {seconds:8.2f} {speed:13.0f} {cpu_s:12.2f}")


if __name__ == "__main__":
    main()
