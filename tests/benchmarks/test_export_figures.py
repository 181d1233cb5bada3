"""The figures of `python -m benchmarks export` that do not depend on the machine: bytes per token."""

import json
from pathlib import Path

import pytest

from benchmarks.export import BASE, BASE_ESSENTIAL, NUM_SEQUENCES, NUM_TOKENS, make_batch, write_lists
from pellucid.export.jsonl import JsonlRecords
from pellucid.export.parquet import ParquetSink
from tolerance import near


@pytest.mark.parametrize(
    ("name", "fields", "bound"),
    [("a.jsonl", BASE, 140), ("a.parquet", BASE, 26), ("b.parquet", BASE_ESSENTIAL, 14)],
)
def test_bytes_per_token(tmp_path, name, fields, bound) -> None:
    path = tmp_path / name
    sink = JsonlRecords(path, fields) if path.suffix == ".jsonl" else ParquetSink(path, fields)
    sink.write(make_batch())
    sink.close()
    assert path.stat().st_size / NUM_TOKENS <= bound


def test_both_sides_write_the_same(tmp_path: Path) -> None:
    batch = make_batch()
    write_lists(tmp_path / "lists.jsonl", batch, BASE)
    sink = JsonlRecords(tmp_path / "ours.jsonl", BASE)
    sink.write(batch)
    sink.close()
    ours, lists = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("ours", "lists")
    )
    assert len(ours) == NUM_SEQUENCES and [list(record) for record in ours] == [list(r) for r in lists]
    for own, other in zip(ours, lists, strict=True):
        assert own["token_ids"] == other["token_ids"] and own["env_name"] == other["env_name"]
        assert own["mismatch_kl"] == near(other["mismatch_kl"], terms=1, each=True)
