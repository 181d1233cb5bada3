"""`pellucid.export.open`: the same records from either format, in parts, derived, filtered, as frames."""

import json
import math
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import given, settings

import pellucid.export
from pellucid.data import TokenTable
from pellucid.errors import ConfigError, DataError
from pellucid.export import FIELDS
from pellucid.export.jsonl import JsonlRecords, JsonlSource
from pellucid.export.parquet import ParquetSink
from token_exports import write_run
from tolerance import near

TOKENS = [field.name for field in FIELDS if field.per_token]
DERIVED = [field.name for field in FIELDS if field.derivable]


@pytest.fixture(params=["jsonl", "parquet", "essential jsonl", "essential parquet"])
def run(request, tmp_path) -> Path:
    *essential, format = request.param.split()
    return write_run(tmp_path, format=format, columns="essential" if essential else "all")


def test_records_are_the_same_in_every_format(run, tmp_path) -> None:
    """The JSONL of all columns is what the other formats have to give back."""
    plain = pellucid.export.open(write_run(tmp_path / "plain"))
    found = pellucid.export.open(run)
    assert found.steps == plain.steps == (0, 1)
    assert [record.key for record in found.records()] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 0, 3)
    ]  # fmt: skip
    for record, expected in zip(found.records(), plain.records(), strict=True):
        assert set(record) == set(expected) == {field.name for field in FIELDS}
        own, other = record.as_dict(), expected.as_dict()
        assert {name: own[name] for name in own if name not in DERIVED} == {
            name: other[name] for name in own if name not in DERIVED
        }
        for name in DERIVED:
            assert np.array(record[name]) == near(np.array(expected[name]), terms=4, scale=4.0)


def test_values_of_one_record(run) -> None:
    third = pellucid.export.open(run).step(0)[1]
    assert (third["env_name"], third["reward"], third["advantage"], third["micro_sequence_idx"]) == (
        "b",
        0,
        1,
        2,
    )
    assert third["role_spans"] == [["user", 0, 1]]
    assert third["token_ids"].tolist() == [7, 8] and third["token_ids"].dtype == np.uint32
    assert third["position_ids"].tolist() == [0, 1]
    assert third["rewards"].tolist() == [0.0, 0.0]
    assert third["policy_versions"].tolist() == [-1, 0]
    assert third["log_importance_ratio"].tolist() == [-3.0, 1.5]
    assert third["prob_delta"][1] == pytest.approx(np.exp(-0.5) - np.exp(-2.0))
    assert third["is_masked_high"].tolist() == [False, True]
    assert third["token_loss"].tolist() == pytest.approx([0.0, 1e-3 * 1.5**2])
    assert np.isnan(third["teacher_logprobs"]).all()
    assert "nonsense" not in third and third.get("nonsense") is None
    assert third.num_tokens == 2


def test_sft_has_no_ratios_and_no_masks(run) -> None:
    (first, _) = pellucid.export.open(run).records(training_mode="sft")
    assert first["is_masked"] is first["is_masked_high"] is None
    assert np.isnan(first["mismatch_kl"]).all() and np.isnan(first["prob_delta"]).all()
    assert first.as_dict()["is_masked"] == [None] * 4
    assert first["token_loss"].tolist() == [0.0, 0.0, 1.5, 0.25]


def test_columns_over_a_whole_step(run) -> None:
    step = pellucid.export.open(run).step(1)
    assert step.lengths.tolist() == [4, 2, 4, 2]
    assert step.column("token_ids").tolist() == [1, 2, 3, 4, 7, 8] * 2
    assert step.column("reward").tolist() == [1.0, 0.0] * 2
    assert step.column("is_masked").tolist() == [False] * 5 + [True] + [False] * 6
    kl = step.column("mismatch_kl")
    assert kl[2] == pytest.approx(np.exp(-0.5) + 0.5 - 1) and np.isnan(kl[6:]).all()


def test_filters(run) -> None:
    export = pellucid.export.open(run)
    assert [record.key for record in export.records(env_name="b")] == [(0, 0, 1), (1, 0, 1), (1, 0, 3)]
    assert [record.key for record in export.records({1}, env_name={"a"}, training_mode="rl")] == [(1, 0, 0)]
    assert len(export.records().where(reward=lambda reward: reward > 0.5)) == 3
    assert [record.key for record in export.records()[1:3]] == [(0, 0, 1), (1, 0, 0)]
    with pytest.raises(
        DataError, match=r"where\(entropy=…\): not a field of a sequence; those are schema_ver"
    ):
        export.records(entropy=1.0)


def test_views_for_other_tools(run) -> None:
    records = pellucid.export.open(run).records()
    table = records.arrow()
    assert table.schema.names == [field.name for field in FIELDS]
    assert table.column("is_masked").to_pylist()[4] == [None] * 4
    assert records.arrow(["step", "entropy"]).column("entropy").to_pylist()[0] == [3.0, 1.0, 1.5, 0.25]
    assert records.pandas(["reward"])["reward"].tolist() == [1.0, 0.0] * 3
    assert records.polars(["env_name"])["env_name"].to_list() == ["a", "b"] * 3
    with records.duckdb() as connection:
        query = """SELECT env_name, count(*), sum(token_loss), max(token) FROM tokens
            WHERE loss_mask AND training_mode = 'rl' GROUP BY env_name ORDER BY env_name"""
        (a, b) = connection.execute(query).fetchall()
        total = records.where(training_mode="rl", env_name="a").column("token_loss").sum()
    assert (a[0], a[1], a[3]) == ("a", 4, 3) and a[2] == pytest.approx(total)
    assert b[:2] == ("b", 2)
    with pytest.raises(DataError, match="'nonsense' is not a field"):
        records.arrow(["nonsense"])


def test_the_sum_of_token_losses_is_the_loss(run) -> None:
    step = pellucid.export.open(run).step(0)
    expected = [-0.5 * np.exp(-0.5) + 1e-3 * 0.25, -0.5 * np.exp(0.25) + 1e-3 * 0.0625, 1e-3 * 2.25]
    assert step.column("token_loss").sum() == pytest.approx(sum(expected))


def test_one_jsonl_record_is_read_without_parsing_the_others(tmp_path) -> None:
    export = pellucid.export.open(write_run(tmp_path))
    path = tmp_path / "token_exports" / "step_1" / "rank_0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    broken = lines[0].replace('"loss_mask":[false', '"loss_mask":[oops_')
    assert len(broken) == len(lines[0]) and broken != lines[0]
    path.write_text("".join([broken, *lines[1:]]))
    step = export.step(1)
    assert step[1]["token_ids"].tolist() == [7, 8]
    with pytest.raises(DataError, match=r"rank_0.jsonl:1 is not JSON"):
        step[0]["token_ids"]


def test_a_parquet_file_that_is_cut_short_is_reported_and_left_out(tmp_path) -> None:
    write_run(tmp_path, format="parquet")
    path = tmp_path / "token_exports" / "step_1" / "rank_0.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    told: list[str] = []
    export = pellucid.export.open(tmp_path, report=told.append)
    assert [record.key[0] for record in export.records()] == [0, 0]
    assert export.problems == told and len(told) == 1 and f"{path} is cut short" in told[0]


def test_a_damaged_row_group_is_reported_and_the_whole_ones_are_kept(tmp_path) -> None:
    import pyarrow.parquet as pq

    write_run(tmp_path, format="parquet")
    path = tmp_path / "token_exports" / "step_1" / "rank_0.parquet"
    group = pq.ParquetFile(path).metadata.row_group(1)
    column = next(
        chunk for chunk in map(group.column, range(group.num_columns)) if chunk.path_in_schema == "step"
    )
    data = bytearray(path.read_bytes())
    end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    data[end - 1] ^= 0xFF
    path.write_bytes(data)
    export = pellucid.export.open(tmp_path, report=lambda problem: None)
    assert [record.key for record in export.step(1)] == [(1, 0, 0), (1, 0, 1)]
    assert [record["training_mode"] for record in export.step(1)] == ["rl", "rl"]
    (problem,) = export.problems
    assert f"{path}, row group 1 is damaged; skipped" in problem


def test_foreign_parquet_needs_a_list_of_token_ids(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"token": [1, 2], "logprob": [0.5, 0.1]}), tmp_path / "x.parquet")
    with pytest.raises(
        DataError, match=r"x.parquet: expected one row per sequence with a list column token_ids"
    ):
        pellucid.export.open(tmp_path / "x.parquet").records()
    columns = {
        "token_ids": [[1, 2], [3]],
        "entropy": [[0.5, None], [0.25]],
        "is_masked": [[True, False], None],
    }
    pq.write_table(pa.table(columns), tmp_path / "y.parquet")
    first, second = pellucid.export.open(tmp_path / "y.parquet").records()
    assert first.as_dict() == {
        "token_ids": [1, 2], "entropy": [0.5, None], "is_masked": [True, False], "position_ids": [0, 1]
    }  # fmt: skip
    assert second["is_masked"] is None and second.key == (0, 0, 0)


def test_an_explicit_parquet_path_gets_step_and_rank(tmp_path) -> None:
    write_run(tmp_path, format="parquet", path=tmp_path / "mine.parquet", rank=3)
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == [
        "mine.step_0.rank_3.parquet", "mine.step_1.rank_3.parquet"
    ]  # fmt: skip
    assert pellucid.export.open(tmp_path).steps == (0, 1)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_elsewhere_is_read_through_the_run_folder(tmp_path, format) -> None:
    """The same records and summaries as without a path, step by step; also after the run folder was moved,
    if the files are in it."""
    plain = pellucid.export.open(write_run(tmp_path / "plain", format=format))
    for path in (Path(f"own/tokens.{format}"), tmp_path / "far" / f"tokens.{format}"):
        run = tmp_path / f"run_{path.is_absolute()}"
        write_run(run, format=format, path=path)
        run = run.rename(tmp_path / f"moved_{path.is_absolute()}")
        for step, marker in enumerate(sorted(run.glob("token_exports/step_*/STABLE"))):
            assert marker.parent.name == f"step_{step}"
        elsewhere = pellucid.export.open(run)
        assert elsewhere.steps == plain.steps == (0, 1)
        for step in elsewhere.steps:
            found = [record.as_dict() for record in elsewhere.step(step)]
            assert found == [record.as_dict() for record in plain.step(step)] and found
            summary = json.loads((run / f"token_exports/step_{step}/summary.rank_0.json").read_text())
            assert summary == plain.summary(step).as_dict() == elsewhere.summary(step).as_dict()


def test_an_export_that_is_gone_is_named(tmp_path) -> None:
    write_run(tmp_path, path="tokens.jsonl")
    (tmp_path / "tokens.rank_0.jsonl").unlink()
    with pytest.raises(DataError, match=r"rank_0.link.json says that the records are in \S+, which is gone"):
        pellucid.export.open(tmp_path).step(0)


def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"duckdb\(\) needs duckdb, .*pip install 'pellucid\[export\]'"):
        pellucid.export.open(write_run(tmp_path)).records().duckdb()


def test_base_columns_of_another_trainer_are_enough(tmp_path) -> None:
    base = [field.name for field in FIELDS if field.base]
    lines = (write_run(tmp_path) / "token_exports" / "step_0" / "rank_0.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    file = tmp_path / "foreign.jsonl"
    file.write_text(json.dumps({name: record[name] for name in base}) + "\n")
    (foreign,) = pellucid.export.open(file).records()
    assert set(foreign) == set(base) and foreign.get("token_loss") is None
    assert foreign["trainer_logprobs"].tolist() == [-3.0, -1.0, -1.5, -0.25]


def test_the_code_of_the_page_runs(tmp_path, capsys) -> None:
    text = (Path(__file__).parents[2] / "docs" / "read-an-export.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    code = code.replace("outputs/reverse_text/rl", str(write_run(tmp_path))).replace("(3)", "(1)")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["record"].key == (1, 0, 0) and len(names["correct"]) == 0
    assert names["count"].sum() == 3 == names["trainable"].sum() // 2
    assert capsys.readouterr().out.startswith("(0, 1)\na 1.0 ")


numbers = st.floats(width=32) | st.just(math.nan)


@st.composite
def batches(draw) -> TokenTable:
    """Any values, in sequences of any lengths; a mask may be null for the whole batch."""
    lengths = np.array(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)), np.int64)
    columns = {}
    for field in FIELDS:
        size = int(lengths.sum()) if field.per_token else len(lengths)
        kind = field.array_dtype.kind
        if field.name == "role_spans":
            columns[field.name] = np.empty(size, object)
            columns[field.name][:] = [[["user", 0, 1]]] * size
        elif field.dtype is str:
            columns[field.name] = np.array(draw(st.lists(st.text(), min_size=size, max_size=size)), object)
        elif kind == "f":
            values = draw(st.lists(numbers, min_size=size, max_size=size))
            columns[field.name] = np.array(values, field.dtype)
        elif kind == "b" and draw(st.booleans()):
            columns[field.name] = np.full(size, np.nan, np.float32)
        else:
            high = 1 if kind == "b" or field.name == "schema_version" else 2**31 - 1
            low = 1 if field.name == "denominator" else 0
            values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
            columns[field.name] = np.array(values).astype(field.dtype)
    return TokenTable(lengths, columns)


@settings(max_examples=40)
@given(batches())
def test_what_is_written_is_what_is_read(batch) -> None:
    """By both formats alike, whatever the values; what is not finite is null."""
    with TemporaryDirectory() as folder:
        for sink in (
            JsonlRecords(Path(folder) / "a.jsonl", FIELDS),
            ParquetSink(Path(folder) / "a.parquet", FIELDS),
        ):
            sink.write(batch)
            sink.close()
        for name in ("a.jsonl", "a.parquet"):
            records = pellucid.export.open(Path(folder) / name).records()
            order = [record.row for record in records]
            assert sorted(order) == list(range(batch.num_sequences))
            found, expected = records.batch([field.name for field in FIELDS]), batch.select(order)
            assert found.lengths.tolist() == expected.lengths.tolist()
            for column in expected.columns:
                own, values = found[column], expected[column]
                if values.dtype.kind == "f":
                    np.testing.assert_array_equal(own, np.where(np.isfinite(values), values, np.nan))
                else:
                    assert own.tolist() == values.tolist(), column


def test_a_damaged_line_of_a_step_is_named_as_the_file_counts_it(tmp_path) -> None:
    """The step is lines 3 and 4 of a file that it shares with others."""
    before, step = b'{"a": 1}\n\n', b"\n{broken\n"
    path = tmp_path / "tokens.rank_0.jsonl"
    path.write_bytes(before + step + b"{}\n")
    with pytest.raises(DataError, match=re.escape(f"{path}:4 is not JSON")):
        JsonlSource(path, pytest.fail, (len(before), len(before + step)))


ODD_LINES = {
    "the last one of two counts": lambda line: line[:-1] + b',"entropy":[7.0,8.0]}',
    "in another order": lambda line: orjson.dumps(orjson.loads(line), option=orjson.OPT_SORT_KEYS),
    "another name at the place of a text": lambda line: line.replace(
        b'"env_name":"math"', b'"env_name":null,"seed":1'
    ),
    "a name more": lambda line: b'{"odd":"",' + line[1:],
    "blanks": lambda line: line.replace(b":", b" : "),
}


@pytest.mark.parametrize("odd", ODD_LINES.values(), ids=ODD_LINES.keys())
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "entropy"),
        ({"env_name": 'a "entropy":[9,9], {b'}, "entropy"),  # a brace: the line is parsed whole
        ({"env_name": 'a "entropy":[9,9], b'}, "entropy"),
        ({"stop_reason": '"entropy":[9,9]'}, "entropy"),
        ({"stop_reason": "a, b]:"}, "stop_reason"),
        ({"stop_reason": ":"}, "stop_reason"),
        ({"env_name": None}, "env_name"),
        ({"reward": 0.125}, "reward"),
        ({"reward": None}, "reward"),
        ({"role_spans": [["user", 0, 1], ["assistant", 1, 2]]}, "role_spans"),
        ({"other": {"entropy": [9.0, 9.0]}}, "entropy"),
        ({"entropy": None}, "entropy"),
        ({"extra": [3.0, 4.0]}, "extra"),
    ],
)
def test_some_columns_of_many_lines_are_those_of_each_line(tmp_path, changes, name, odd) -> None:
    """Many lines are cut, one is parsed whole."""
    record = {
        "schema_version": 1,
        "step": 0,
        "rank": 0,
        "env_name": "math",
        "token_ids": [5, 9],
        "entropy": [0.5, None],
        "stop_reason": "stop",
        "reward": 1,
    } | changes
    lines = [orjson.dumps(record | {"export_sequence_idx": row}) for row in range(8)]
    lines += [json.dumps(record | {"export_sequence_idx": row}).encode() for row in range(8, 10)]
    lines += [odd(lines[0])]
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    source = JsonlSource(path, pytest.fail)
    whole = source.batch(range(11), [name])
    each = TokenTable.concat([source.batch([row], [name]) for row in range(11)])
    assert whole.lengths.tolist() == [2] * 11 and (name in whole) == (name in each)
    if name in whole:
        assert whole[name].dtype == each[name].dtype
        np.testing.assert_array_equal(whole[name], each[name])
    if name == "entropy" and changes.get("entropy", 0) is not None:
        last = [7.0, 8.0] if odd is ODD_LINES["the last one of two counts"] else [0.5, np.nan]
        np.testing.assert_array_equal(whole["entropy"], [0.5, np.nan] * 10 + last)


def test_many_plain_lines_are_not_parsed_one_by_one(tmp_path, monkeypatch) -> None:
    """Of a multi-turn run, too, whose records have spans of roles in any number."""
    path = tmp_path / "rank_0.jsonl"
    spans = [[["user", at, at + 1] for at in range(turns)] for turns in (1, 3, 2, 3, 1, 7)]
    records = [
        {
            "step": 0,
            "rank": 0,
            "export_sequence_idx": row,
            "token_ids": [row] * len(own),
            "role_spans": own,
            "is_masked": None,
        }
        for row, own in enumerate(spans)
    ]
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    monkeypatch.setattr("pellucid.export.jsonl.as_record", pytest.fail)
    batch = JsonlSource(path, pytest.fail).batch(range(6), ["token_ids", "role_spans", "is_masked"])
    assert batch.lengths.tolist() == [1, 3, 2, 3, 1, 7] and batch["role_spans"].tolist() == spans
    assert "is_masked" not in batch


def test_lines_are_parsed_some_at_a_time(tmp_path, monkeypatch) -> None:
    records = [
        {
            "step": 0,
            "export_sequence_idx": row,
            "token_ids": [row] * 3,
            "entropy": [0.5, None, row],
            "odd": odd,
        }
        for row, odd in enumerate([[1.0, 2.0, 3.0]] * 6 + ["x"] * 6)
    ]
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    names = ["token_ids", "entropy", "odd"]
    whole = JsonlSource(path, pytest.fail).batch(range(12), names)
    monkeypatch.setattr("pellucid.export.jsonl._BLOCK_BYTES", 200)
    parts = JsonlSource(path, pytest.fail).batch(range(12), names)
    assert set(whole.columns) == set(parts.columns) == {"token_ids", "entropy"}  # odd is of tokens or not
    for name in whole.columns:
        np.testing.assert_array_equal(whole[name], parts[name])
    assert parts["token_ids"].tolist() == [row for row in range(12) for _ in range(3)]
