"""Samples on the wire: columnar bytes against lists in msgpack, and against lists packed when they are sent.

A ratio of bytes below 1 is smaller; one of speeds above 1 is faster. Every side starts from what it keeps in
process, samples or lists, and ends with what a packer can use. `growth` compares the time per sample of
50,000 with that of 1,000, an eighth as long as the others.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.lists import as_lists
from benchmarks.result import Result, fastest_each_s
from benchmarks.workload import draw_samples, long_sample
from pellucid.data import TokenTable, TrainingSample
from pellucid.transport import Batch, decode_batch, encode_batch
from pellucid.transport.sections import Compression

LISTS = "lists in msgpack"
PACKED = "lists packed at sending, inflated at receipt"
_REPEATS = 7


def run() -> list[Result]:
    samples = draw_samples()
    lists = [as_lists(sample) for sample in samples]
    num_tokens = sum(sample.length for sample in samples)
    return [
        *_sizes_of_one(),
        *_sizes(samples, lists, num_tokens),
        *_speeds(samples, lists, num_tokens),
        *_growth(),
    ]


def _sizes_of_one() -> list[Result]:
    sample = long_sample()
    lists = as_lists(sample)
    wire, process = len(_encode([sample])), size_in_process(sample)
    list_wire, list_process = len(msgspec.msgpack.encode(lists)), size_in_process(lists)
    return [
        Result("transport, 30,000-token sample on the wire", wire, list_wire, "bytes", LISTS),
        Result("transport, 30,000-token sample in process", process, list_process, "bytes", LISTS),
    ]


def _sizes(
    samples: Sequence[TrainingSample], lists: Sequence[dict[str, Any]], num_tokens: int
) -> list[Result]:
    as_msgpack = len(msgspec.msgpack.encode(lists)) / num_tokens
    return [
        Result(
            f"transport, batch, compression {compression}",
            len(_encode(samples, compression)) / num_tokens,
            as_msgpack,
            "bytes/token",
            LISTS,
        )
        for compression in _COMPRESSIONS
    ]


_COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")


def _speeds(
    samples: Sequence[TrainingSample], lists: Sequence[dict[str, Any]], num_tokens: int
) -> list[Result]:
    payloads = {compression: _encode(samples, compression) for compression in _COMPRESSIONS}
    packed = pack_lists(lists)
    encoding = fastest_each_s(
        [lambda: pack_lists(lists), lambda: _encode(samples), lambda: _encode(samples, "zstd")], _REPEATS
    )
    decoding = fastest_each_s(
        [
            lambda: unpack_lists(packed),
            lambda: decode_batch(payloads["none"], sender="bench"),
            lambda: decode_batch(payloads["zstd"], sender="bench"),
        ],
        _REPEATS,
    )
    return [
        Result(
            f"transport, {verb}, compression {compression}",
            num_tokens / our_s,
            num_tokens / baseline_s,
            "tok/s",
            PACKED,
        )
        for verb, (baseline_s, *ours) in (("encode", encoding), ("decode", decoding))
        for compression, our_s in zip(_COMPRESSIONS, ours, strict=True)
    ]


def _growth() -> list[Result]:
    many = draw_samples(50_000, scale=1 / 8)
    few = many[:1_000]
    payloads = [_encode(samples) for samples in (many, few)]
    encoding = fastest_each_s([lambda: _encode(many), lambda: _encode(few)], _REPEATS)
    decoding = fastest_each_s(
        [lambda payload=payload: decode_batch(payload, sender="bench") for payload in payloads],  # type: ignore[misc]
        _REPEATS,
    )
    return [
        Result(
            f"transport, growth of {verb}",
            1e6 * many_s / len(many),
            1e6 * few_s / len(few),
            "µs/sample",
            "1,000 samples",
        )
        for verb, (many_s, few_s) in (("encode", encoding), ("decode", decoding))
    ]


def _encode(samples: Sequence[TrainingSample], compression: Compression = "none") -> bytes:
    return encode_batch(Batch("bench", 0, TokenTable.from_samples(samples)), compression=compression)


def pack_lists(lists: Sequence[dict[str, Any]]) -> bytes:
    """The baseline's way out: every list becomes an array when the batch is sent."""
    return msgspec.msgpack.encode(
        [
            {
                **sample,
                "prompt_ids": np.array(sample["prompt_ids"], np.uint32).tobytes(),
                "prompt_mask": np.packbits(np.array(sample["prompt_mask"], np.bool_)).tobytes(),
                "completion_ids": np.array(sample["completion_ids"], np.uint32).tobytes(),
                "completion_mask": np.packbits(np.array(sample["completion_mask"], np.bool_)).tobytes(),
                "completion_logprobs": np.array(sample["completion_logprobs"], np.float32).tobytes(),
            }
            for sample in lists
        ]
    )


def unpack_lists(payload: bytes) -> list[dict[str, Any]]:
    """The baseline's way in: every array becomes a list again."""
    samples: list[dict[str, Any]] = msgspec.msgpack.decode(payload)
    for sample in samples:
        for part in ("prompt", "completion"):
            sample[f"{part}_ids"] = np.frombuffer(sample[f"{part}_ids"], np.uint32).tolist()
            bits = np.frombuffer(sample[f"{part}_mask"], np.uint8)
            mask = np.unpackbits(bits, count=len(sample[f"{part}_ids"])).view(np.bool_)
            sample[f"{part}_mask"] = mask.tolist()
        sample["completion_logprobs"] = np.frombuffer(sample["completion_logprobs"], np.float32).tolist()
    return samples


def size_in_process(value: Any) -> int:
    """Bytes of an object and of all that it holds, each counted once."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen and not isinstance(item, type):
            seen[id(item)] = item
            waiting += (
                msgspec.structs.astuple(item) if isinstance(item, msgspec.Struct) else gc.get_referents(item)
            )
    return sum(sys.getsizeof(item) for item in seen.values())
