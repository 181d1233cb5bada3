"""From the orchestrator's samples to the trainer's tensors: encode, decode, pack, tensors.

The list path does the same with a Python object per value: msgpack of lists, lists joined into micro batches,
tensors made of those. Both end with the same tensors. Peak memory is what our path takes beside the samples,
payload included.
"""

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.lists import as_lists
from benchmarks.result import Result, fastest_each_s
from benchmarks.workload import MAX_LENGTH, draw_samples
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import TokenTensors, to_tensors
from pellucid.packing import Cost, Sequences, pack_batch, plan
from pellucid.transport import Batch, decode_batch, encode_batch

CAPACITY = 32_768
"""Tokens of a micro batch."""

_CPU = torch.device("cpu")
_REPEATS = 7


def run() -> list[Result]:
    torch.set_num_threads(1)
    samples = draw_samples()
    lists = [
        {**as_lists(sample), "policy_versions": sample.arrays["policy_versions"].array().tolist()}
        for sample in samples
    ]
    tokens = sum(sample.length for sample in samples)
    our_s, list_s = fastest_each_s(
        [lambda: drain(our_path(samples)), lambda: drain(list_path(lists))], _REPEATS
    )
    peak, num_bytes = _peak(samples)
    return [
        Result("tensors, one hop", tokens / our_s, tokens / list_s, "tok/s", "lists all the way"),
        Result("tensors, peak memory", peak, num_bytes, "bytes", "the payload's size"),
    ]


def drain(micro_batches: Iterator[Any]) -> None:
    """Each is dropped before the next is made, as in training."""
    for _ in micro_batches:
        pass


def our_path(samples: Sequence[TrainingSample]) -> Iterator[TokenTensors]:
    payload = encode_batch(Batch("bench", 0, TokenTable.from_samples(samples)))
    table = decode_batch(payload, sender="bench").table
    for micro_batch in pack_batch(table, seq_len=MAX_LENGTH, max_tokens=CAPACITY).micro_batches(rank=0):
        yield to_tensors(micro_batch.table, _CPU)


def list_path(lists: Sequence[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(lists))
    lengths = [len(sample["prompt_ids"]) + len(sample["completion_ids"]) for sample in received]
    sequences = Sequences.apart(np.array(lengths, np.int64))
    for step in plan(sequences, max_tokens=CAPACITY, num_ranks=1, cost=Cost()):
        yield _tensors([received[index] for index in step.bins[0]])


def _tensors(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    columns: dict[str, list[Any]] = {name: [] for name in _DTYPES}
    for sample in samples:
        num_prompt, num_completion = len(sample["prompt_ids"]), len(sample["completion_ids"])
        columns["positions"] += range(num_prompt + num_completion)
        columns["token_ids"] += sample["prompt_ids"] + sample["completion_ids"]
        columns["loss_mask"] += sample["prompt_mask"] + sample["completion_mask"]
        columns["inference_logprobs"] += [0.0] * num_prompt + sample["completion_logprobs"]
        columns["temperatures"] += [sample["temperature"]] * (num_prompt + num_completion)
        columns["advantages"] += [sample["advantage"]] * (num_prompt + num_completion)
    return {name: torch.tensor(values, dtype=_DTYPES[name]) for name, values in columns.items()}


_DTYPES = {
    "positions": torch.int32,
    "token_ids": torch.int32,
    "loss_mask": torch.bool,
    "inference_logprobs": torch.float32,
    "temperatures": torch.float32,
    "advantages": torch.float32,
}


def _peak(samples: Sequence[TrainingSample]) -> tuple[int, int]:
    """Bytes allocated at most, and the payload's; numpy's are traced, and the tensors are views of those."""
    num_bytes = len(encode_batch(Batch("bench", 0, TokenTable.from_samples(samples))))
    tracemalloc.start()
    try:
        drain(our_path(samples))
        return tracemalloc.get_traced_memory()[1], num_bytes
    finally:
        tracemalloc.stop()
