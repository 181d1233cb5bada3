"""Token exports: writing a micro batch of 32,768 tokens in 12 sequences, and reading out of 1,000,000 tokens.

The base columns, one thread, into a file. The baseline of writing makes Python lists of the values and gives
them to `json.dumps`; that of reading parses the JSONL with orjson, the fastest parser at hand.
"""

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import torch

import pellucid.export
from benchmarks.result import Result, fastest_each_s, fastest_s
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.schema import FIELDS, Column
from pellucid.export import TokenExporter
from pellucid.export.jsonl import JsonlRecords
from pellucid.export.parquet import ParquetSink, require
from pellucid.export.writer import micro_batch_columns

NUM_TOKENS, NUM_SEQUENCES = 32_768, 12
NUM_LARGE = 1_000_000
VOCABULARY = 151_936
BASE = tuple(field for field in FIELDS if field.base)
BASE_ESSENTIAL = tuple(field for field in BASE if not field.derivable)
LISTS = "lists, json.dumps"


def run() -> list[Result]:
    require("pyarrow", "benchmark export").set_cpu_count(1)
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        memory = _memory(folder)  # first: Arrow knows the most that it ever held
        return [*_writing(folder), *_reading(folder), memory]


def micro_batch(seed: int = 0) -> TokenTable:
    """Sequences of unequal lengths, a quarter of each prompt; the ids of words are Zipf's."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(64, NUM_TOKENS - 64, 64), NUM_SEQUENCES - 1, replace=False))
    samples = []
    for index, length in enumerate(np.diff([0, *cuts.tolist(), NUM_TOKENS]).tolist()):
        num_prompt = length // 4
        ids = np.minimum(rng.pareto(0.6, length) * 50, VOCABULARY - 1).astype(np.uint32)
        samples.append(
            TrainingSample.from_turn(
                ids[:num_prompt],
                ids[num_prompt:],
                -rng.gamma(0.35, 1.2, length - num_prompt),
                env_name=("math", "code")[index % 2],
                group_id=f"g{index // 4}",
                rollout_id=f"g{index // 4}-r{index % 4}",
                reward=float(index % 2),
                advantage=float(rng.normal(0, 0.5)),
            )
        )
    return TokenTable.from_samples(samples)


def observed(table: TokenTable, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a trainer a few steps ahead of the engine sees: ℓ of about 0.02."""
    rng = np.random.default_rng(seed)
    inference, trainable = table.dense("inference_logprobs"), table["loss_mask"]
    noise = rng.normal(0, 0.02, table.num_tokens) * (1 - np.exp(inference))
    guess = -rng.gamma(0.35, 1.2, table.num_tokens)
    trainer = np.where(trainable, np.minimum(inference + noise, 0), guess).astype(np.float32)
    ratio = trainer - inference
    delta = np.exp(trainer) - np.exp(inference)
    masked = trainable & (np.abs(delta) > 0.2)
    positive = table.dense("advantages") > 0
    columns = {
        "trainer_logprobs": trainer,
        "entropy": rng.gamma(0.5, 1.0, table.num_tokens).astype(np.float32),
        "mismatch_kl": np.expm1(ratio) - ratio,
        "log_importance_ratio": ratio,
        "importance_ratio": np.exp(ratio),
        "prob_delta": delta,
        "is_masked": masked,
        "is_masked_high": masked & positive,
        "is_masked_low": masked & ~positive,
        "token_loss": np.where(trainable, -table.dense("advantages") * np.exp(ratio), 0).astype(np.float32),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()}


def make_batch(seed: int = 0, micro_step: int = 0) -> TokenTable:
    table = micro_batch(seed)
    batch, _ = micro_batch_columns(
        table,
        observed(table, seed),
        step=0,
        rank=0,
        micro_step=micro_step,
        denominator=table.num_trainable,
        num_written=micro_step * NUM_SEQUENCES,
        precision="float32",
    )
    return batch


def write_lists(path: Path, batch: TokenTable, fields: Sequence[Column]) -> None:
    """The usual way: a dict of lists per sequence."""
    with path.open("w") as file:
        for row in range(batch.num_sequences):
            start, stop = batch.token_offsets[row], batch.token_offsets[row + 1]
            record: dict[str, Any] = {}
            for field in fields:
                values = batch[field.name]
                record[field.name] = values[start:stop].tolist() if field.per_token else values.tolist()[row]
            file.write(json.dumps(record) + "\n")


def _writing(folder: Path) -> Iterator[Result]:
    batch = make_batch()

    def lists() -> None:
        write_lists(folder / "lists.jsonl", batch, BASE)

    def jsonl(fields: Sequence[Column]) -> None:
        sink = JsonlRecords(folder / "ours.jsonl", fields)
        sink.write(batch)
        sink.close()

    def parquet(fields: Sequence[Column]) -> None:
        sink = ParquetSink(folder / "ours.parquet", fields)
        sink.write(batch)
        sink.close()

    ways: dict[str, Callable[[], None]] = {
        "JSONL": lambda: jsonl(BASE),
        "Parquet": lambda: parquet(BASE),
        "Parquet, essential": lambda: parquet(BASE_ESSENTIAL),
    }
    lists_s, *ours_s = fastest_each_s([lists, *ways.values()], repeats=5)
    for way, our_s in zip(ways, ours_s, strict=True):
        yield Result(f"export, writing {way}", NUM_TOKENS / our_s, NUM_TOKENS / lists_s, "tokens/s", LISTS)
    list_bytes = (folder / "lists.jsonl").stat().st_size / NUM_TOKENS
    for way, work in ways.items():
        work()
        path = folder / ("ours.jsonl" if way == "JSONL" else "ours.parquet")
        yield Result(f"export, {way}", path.stat().st_size / NUM_TOKENS, list_bytes, "bytes/token", LISTS)


def _reading(folder: Path) -> Iterator[Result]:
    jsonl, parquet = folder / "large.jsonl", folder / "large.parquet"
    sinks = JsonlRecords(jsonl, BASE), ParquetSink(parquet, BASE)
    num_batches = -(-NUM_LARGE // NUM_TOKENS)
    for micro_step in range(num_batches):
        batch = make_batch(micro_step, micro_step)
        for sink in sinks:
            sink.write(batch)
    for sink in sinks:
        sink.close()
    wanted = num_batches * NUM_SEQUENCES // 2

    def parse() -> list[Any]:
        with jsonl.open("rb") as file:
            return [orjson.loads(line) for line in file]

    def one_record(path: Path) -> dict[str, Any]:
        return pellucid.export.open(path).records()[wanted].arrays()

    def one_column() -> Any:
        return pellucid.export.open(parquet).records().column("mismatch_kl")

    parse_s = fastest_s(parse, repeats=3)
    ours_s = fastest_each_s([lambda: one_record(parquet), lambda: one_record(jsonl), one_column])
    names = ("one record of 1,000,000 tokens", "the same, JSONL", "one column of 1,000,000 tokens")
    for name, our_s in zip(names, ours_s, strict=True):
        yield Result(f"export, reading {name}", 1 / our_s, 1 / parse_s, "reads/s", "parsing the JSONL")


def _memory(folder: Path) -> Result:
    """The most that exporting a step adds to what is there anyway, however long the step is."""
    _export(folder / "warm up", [micro_batch()], [observed(micro_batch())])
    many, few = (_held_bytes(folder / f"{count} at a time", count) / 1e6 for count in (16, 2))
    return Result("export, memory of 16 micro batches", many, few, "MB", "2 micro batches")


def _held_bytes(folder: Path, num_micro_batches: int) -> int:
    tables = [micro_batch(seed) for seed in range(num_micro_batches)]
    values = [observed(micro_batch(seed), seed) for seed in range(num_micro_batches)]
    tracemalloc.start()
    try:
        _export(folder, tables, values)
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held: int = traced + require("pyarrow", "benchmark export").default_memory_pool().max_memory()
    return held


def _export(folder: Path, tables: list[TokenTable], values: list[dict[str, torch.Tensor]]) -> None:
    """All columns and a summary; what is exported is let go of, as it is in training."""
    exporter = TokenExporter(folder, format="parquet")
    for micro_step in range(len(tables)):
        exporter.add(tables.pop(), values.pop(), step=0, micro_step=micro_step, denominator=1)
    exporter.finish(0)
    exporter.close()
