"""`python -m benchmarks.fuzz_codec`: mutated payloads against the decoder of batches.

    changed                    has to be refused: the checksum sees it
    changed and sealed again   refused, or a batch that obeys every rule, judged by a second, slow checker
                               that looks at each token; encoded again it stays the same

Whatever else happens (another exception, more than a second, more than 1 GiB) is a failure, printed with
the seed and the case that repeat it.
"""

import argparse
import math
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from pellucid.data import COLUMNS, Axis, TokenTable, TrainingMode, TrainingSample
from pellucid.data.images import ImageShape, pack_images
from pellucid.errors import PayloadError
from pellucid.transport import Batch, Limits, decode_batch, encode_batch
from pellucid.transport.batch import PREAMBLE, SEALED_FROM, checksum

VOCAB_SIZE = 1000
LIMITS = Limits(
    max_bytes=1 << 20,
    max_tokens=1 << 20,
    max_sequences=1 << 12,
    vocab_size=VOCAB_SIZE,
    images=ImageShape(token_id=0, patch_size=2, scale_factor=1),
)
NUM_TILES = 14
"""Tiles of 2 × 2 pixels, one token each."""

_DEADLINE_S = 1.0
_MEMORY_BYTES = 1 << 30
_TELLING = [0, 1, 2, 7, 8, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]

_FLOATS = [
    np.nan,
    np.inf,
    -np.inf,
    0,
    -0.0,
    1e-45,
    -1e-45,
    0.01,
    1,
    1e19,
    -1e19,
    3e38,
    -3e38,
    -44,
    -45,
    -9999,
]

_COUNTS = ["step", "num_sequences", "num_tokens", "num_sampled", "num_trainable"]
_GIVEN = {
    *("token_ids", "loss_mask", "sampled", "inference_logprobs", "policy_versions", "routed_experts"),
    *("teacher_logprobs", "temperatures", "advantages", "mm_token_type_ids"),
}
"""Columns of a sample that are drawn; newer ones are filled."""

Generator = np.random.Generator


class Failure(Exception):
    """The decoder did something that it must not do."""


def make_batches(generator: Generator) -> list[Batch]:
    """Of every form: spans and bits, runs and values, shared prompts and none, every column."""
    plain = [_sample(generator, index, prompt=20, completion=30) for index in range(4)]
    sparse = [
        _sample(generator, index, prompt=3, completion=40, completion_mask=generator.random(40) < 0.5)
        for index in range(3)
    ]
    rich = [
        _sample(
            generator,
            index,
            prompt=5,
            completion=70,
            routed_experts=np.tile(np.arange(4).reshape(1, 2, 2), (75, 1, 1)),
            teacher_logprobs=-generator.random(75),
            temperatures=0.5 + generator.random(70),
            advantages=generator.normal(size=70),
            mm_token_type_ids=np.arange(75) >= 75 - NUM_TILES * index,
            mm_tensors=_tiles(generator) if index else b"",
            role_spans=[("user", 0, 5), ("assistant", 5, 75)],
            **{
                name: column.filled(
                    {Axis.TOKENS: 75, Axis.SAMPLED: 70}[column.stored], (2,) * len(column.dims)
                )
                for name, column in COLUMNS.items()
                if column.per_token and name not in _GIVEN
            },
        )
        for index in range(2)
    ]
    sft = TrainingSample.build(
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        sampled=[False] * 3,
        inference_logprobs=[],
        policy_versions=[],
        env_name="sft",
        training_mode="sft",
    )
    opd = [
        _sample(
            generator,
            index,
            prompt=4,
            completion=30,
            training_mode="opd",
            teacher_logprobs=np.where(np.arange(34) == 0, np.nan, -generator.random(34)),
            sample_id=f"r{index}-0",
            reward=float(index),
        )
        for index in range(3)
    ]
    mixes = [plain, sparse, rich, [*plain, sft], [sft], [*opd, sft]]
    return [Batch("run", step, TokenTable.from_samples(samples)) for step, samples in enumerate(mixes)]


def _tiles(generator: Generator) -> bytes:
    pixels = generator.integers(0, 256, (NUM_TILES, 3, 2, 2), np.uint8)
    return pack_images(
        [{"pixels": pixels, "scale": np.ones(3, np.float32), "shift": np.zeros(3, np.float32)}]
    )


def _sample(
    generator: Generator, index: int, *, prompt: int, completion: int, **columns: Any
) -> TrainingSample:
    if "mm_token_type_ids" in columns:
        columns["mm_token_type_ids"] = columns["mm_token_type_ids"].astype(np.uint8)
    return TrainingSample.from_turn(
        np.arange(prompt),
        generator.integers(0, VOCAB_SIZE, completion),
        -generator.random(completion),
        policy_versions=np.arange(completion) // 25,
        env_name=f"env-{index % 2}",
        group_id="g",
        rollout_id=f"r{index}",
        advantage=0.5,
        **columns,
    )


def mutate(payload: bytes, other: bytes, generator: Generator) -> tuple[bytes, bool]:
    """A changed payload, and whether it was sealed again."""
    changed = bytearray(payload)
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        changed = _MUTATIONS[generator.integers(len(_MUTATIONS))](changed, other, generator)
    seal = bool(generator.random() < 0.8)
    if seal and len(changed) >= PREAMBLE.size:
        changed = bytearray(sealed(bytes(changed), with_length=generator.random() < 0.7))
    return bytes(changed), seal


def sealed(payload: bytes, *, with_length: bool = True) -> bytes:
    """With a length and a checksum that fit the bytes, as a hostile sender would make them."""
    changed = bytearray(payload)
    if with_length:
        changed[16:24] = len(changed).to_bytes(8, "little")
    changed[8:16] = checksum(bytes(changed[SEALED_FROM:])).to_bytes(8, "little")
    return bytes(changed)


def with_header(payload: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The payload with a header that `change` has edited, and the same sections; sealed."""
    end = PREAMBLE.size + int.from_bytes(payload[24:32], "little")
    header = msgspec.msgpack.decode(payload[PREAMBLE.size : end])
    change(header)
    head = msgspec.msgpack.encode(header)
    padded = head.ljust(len(head) + -len(head) % 8, b"\0")
    body = payload[end + -end % 8 :]
    return sealed(payload[:24] + len(head).to_bytes(8, "little") + padded + body)


def _place(payload: bytearray, generator: Generator) -> int:
    """Half of the time in preamble and header, where every byte steers the decoder."""
    end = len(payload)
    if generator.random() < 0.5:
        end = min(end, PREAMBLE.size + int.from_bytes(payload[24:32], "little"))
    return int(generator.integers(max(1, end)))


def _flip_bits(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    for _ in range(generator.integers(1, 5)):
        if payload:
            payload[_place(payload, generator)] ^= 1 << generator.integers(8)
    return payload


def _set_byte(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    if payload:
        payload[_place(payload, generator)] = generator.integers(256)
    return payload


def _set_number(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    """One that a size or a count might be, where one might be."""
    width = int(generator.choice([2, 4, 8]))
    start = _place(payload, generator) // width * width
    number = [*_TELLING, len(payload), start][generator.integers(len(_TELLING) + 2)]
    payload[start : start + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return payload


def _set_float(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    """One that a loss might choke on, where a number might be."""
    start = int(generator.integers(max(1, len(payload)))) // 4 * 4
    value = np.float32(_FLOATS[generator.integers(len(_FLOATS))])
    payload[start : start + 4] = value.tobytes()
    return payload


def _truncate(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    return payload[: _place(payload, generator)]


def _append(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    return payload + generator.bytes(int(generator.integers(1, 65)))


def _drop(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    start = _place(payload, generator)
    del payload[start : start + int(generator.integers(1, 65))]
    return payload


def _repeat(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    start = _place(payload, generator)
    part = payload[start : start + int(generator.integers(1, 65))]
    return payload[:start] + part + payload[start:]


def _zero(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    start = _place(payload, generator)
    size = min(int(generator.integers(1, 65)), len(payload) - start)
    payload[start : start + size] = bytes(size)
    return payload


def _splice(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    """Part of another payload in the same place."""
    start = _place(payload, generator)
    size = int(generator.integers(1, 257))
    payload[start : start + size] = other[start : start + size]
    return payload


def _edit_header(payload: bytearray, other: bytes, generator: Generator) -> bytearray:
    """Two sections change places, or one value of the header becomes another that fits its type."""

    def change(header: dict[str, Any]) -> None:
        sections = header["sections"]
        first, second = generator.integers(0, len(sections), 2)
        kind, section = generator.integers(4), sections[first]
        if kind == 0:
            sections[first], sections[second] = sections[second], section
        elif kind == 1:
            header[str(generator.choice(_COUNTS))] = _TELLING[generator.integers(len(_TELLING))]
        elif kind == 2:
            section["num_bytes"] = _TELLING[generator.integers(len(_TELLING))]
        else:
            key = str(generator.choice(["name", "form", "dtype", "dims", "planes"]))
            section[key] = sections[second].get(key, [1, 1])

    try:
        changed = bytearray(with_header(bytes(payload), change))
    except (msgspec.DecodeError, AttributeError, TypeError, LookupError, ValueError, OverflowError):
        return payload  # an earlier mutation has broken the header
    changed[8:16] = payload[8:16]  # `mutate` seals it, or leaves it with a checksum that does not fit
    return changed


_MUTATIONS: list[Callable[[bytearray, bytes, Generator], bytearray]] = [
    *[_flip_bits] * 3,
    *[_set_byte] * 3,
    *[_set_number] * 4,
    *[_set_float] * 4,
    _truncate,
    _append,
    _drop,
    _repeat,
    _zero,
    _splice,
    *[_edit_header] * 3,
]


def judge(payload: bytes, original: bytes, *, sealed: bool) -> str:
    """What the decoder said; raises Failure where it must not have said so."""
    try:
        batch = decode_batch(payload, sender="fuzz", limits=LIMITS)
    except PayloadError as error:
        if not 0 <= error.position <= len(payload):
            raise Failure(f"refused at byte {error.position} of {len(payload)}: {error}") from error
        return "refused"
    except Exception as error:
        raise Failure(f"{type(error).__name__}: {error}") from error
    if payload == original:
        return "unchanged"
    if not sealed:
        raise Failure("a changed payload was taken although its checksum does not fit")
    check_slowly(batch)
    again = decode_batch(encode_batch(batch), sender="fuzz", limits=LIMITS)
    if difference := differing_column(batch.table, again.table):
        raise Failure(f"column {difference} changed when the batch was encoded again")
    return "taken"


def check_slowly(batch: Batch) -> None:
    """The rules of samples once more, on plain Python values, one sequence and one token at a time."""
    names = [name for name in batch.table["sample_id"] if name]
    _require(len(names) == len(set(names)), -1, "has the id of another sample")
    _require(not batch.run_id or set(batch.table["run_id"]) <= {"", batch.run_id}, -1, "is another run's")
    for index in range(batch.table.num_sequences):
        table = batch.table.select([index])
        values = {name: table[name].tolist() for name in COLUMNS}
        size = {Axis.TOKENS: len(values["token_ids"]), Axis.SEQUENCES: 1}
        size[Axis.SAMPLED] = sum(values["sampled"])
        for name, column in COLUMNS.items():
            _require(
                len(values[name]) == size[column.stored], index, f"{name} has {len(values[name])} entries"
            )
        _require(size[Axis.TOKENS] == table.lengths[0] >= 1, index, "has another length than it says")
        _require(all(token < VOCAB_SIZE for token in values["token_ids"]), index, "has an unknown token")
        env = values["env_name"][0]
        _require(env not in ("", "all") and env.isprintable(), index, "has no good environment")
        _require(all(version >= -1 for version in values["policy_versions"]), index, "has an unknown version")
        _require(math.isfinite(values["advantage"][0]), index, "has no advantage")
        _require(not math.isinf(values["reward"][0]), index, "has an endless reward")
        end = 0
        for role, start, stop in values["role_spans"][0]:
            _require(
                end <= start <= stop <= size[Axis.TOKENS] and len(role) <= 64, index, "has no good roles"
            )
            end = stop
        _require(values["training_mode"][0] in set(TrainingMode), index, "has an unknown mode")
        temperatures = [*values["temperature"], *values["temperatures"]]
        _require(all(0 < value < math.inf for value in temperatures), index, "has an impossible temperature")
        _check_tokens(values, index)


def _check_tokens(values: dict[str, list[Any]], index: int) -> None:
    logprobs, advantages = iter(values["inference_logprobs"]), iter(values["advantages"])
    for token, (trains, sampled) in enumerate(zip(values["loss_mask"], values["sampled"], strict=True)):
        _require(not (trains and token == 0), index, "trains its first token")
        _require(
            sampled or not trains or values["training_mode"] == ["sft"], index, "trains what was not sampled"
        )
        if sampled:
            logprob, advantage = next(logprobs), next(advantages)
            _require(not trains or -44 <= logprob <= 0.01, index, "trains a token without a logprob")
            _require(not trains or abs(advantage) <= 1e19, index, "trains a token without an advantage")
        teacher = values["teacher_logprobs"][token]
        has_teacher = -9999 < teacher <= 0.01 or (math.isnan(teacher) and values["training_mode"] != ["opd"])
        _require(not trains or has_teacher, index, "has no teacher")


def _require(holds: bool, index: int, what: str) -> None:
    if not holds:
        raise Failure(f"sequence {index} was taken although it {what}")


def differing_column(left: TokenTable, right: TokenTable) -> str | None:
    if left.lengths.tolist() != right.lengths.tolist():
        return "lengths"
    for name, column in COLUMNS.items():
        one, two = left[name], right[name]
        same = one.tolist() == two.tolist() if not column.is_number else one.tobytes() == two.tobytes()
        if not same:
            return name
    return None


def fuzz(num_payloads: int, seed: int) -> Counter[str]:
    """Outcomes by name; raises Failure with the case that repeats it."""
    batches = make_batches(np.random.default_rng(seed))
    payloads = [encode_batch(batch, compression=kind) for batch in batches for kind in ("none", "zstd")]
    outcomes: Counter[str] = Counter()
    for case in range(num_payloads):
        generator = np.random.default_rng((seed, case))
        original, other = (payloads[index] for index in generator.integers(0, len(payloads), 2))
        mutated, sealed = mutate(original, other, generator)
        try:
            with _deadline():
                outcomes[judge(mutated, original, sealed=sealed)] += 1
        except (Failure, TimeoutError, MemoryError) as error:
            raise Failure(f"seed {seed}, case {case}: {error!r}") from error
    return outcomes


@contextmanager
def _deadline() -> Iterator[None]:
    """Of time on the processor: a machine that is busy with something else is no failure."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {_DEADLINE_S} s")

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, _DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutated payloads against the decoder of batches.")
    parser.add_argument("--payloads", type=int, default=200_000, help="how many (200,000)")
    parser.add_argument("--seed", type=int, default=0, help="of payloads and mutations (0)")
    options = parser.parse_args()
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, resource.RLIM_INFINITY))
    started = time.perf_counter()
    try:
        outcomes = fuzz(options.payloads, options.seed)
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    counts = ", ".join(f"{count:,} {name}" for name, count in outcomes.most_common())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took_s = time.perf_counter() - started
    print(f"{options.payloads:,} payloads: {counts}; {took_s:.0f} s, {peak:.0f} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
