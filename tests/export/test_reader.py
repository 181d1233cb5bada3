"""Token exports read back: order, markers, torn lines, older shapes, and errors that name file and line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pellucid.errors import DataError
from pellucid.export.reader import read_records


def record(step: int = 0, rank: int = 0, index: int = 0, **changes: Any) -> dict[str, Any]:
    return {"step": step, "rank": rank, "export_sequence_idx": index, "token_ids": [5, 9]} | changes


def write(path: Path, *records: Any, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records) + tail)
    return path


def write_step(run: Path, step: int, *, num_ranks: int = 1, stable: bool = True) -> Path:
    folder = run / "token_exports" / f"step_{step}"
    for rank in range(num_ranks):
        write(folder / f"rank_{rank}.jsonl", record(step, rank, 1), record(step, rank, 0))
    if stable:
        (folder / "STABLE").touch()
    return folder


def order(path: Path, **options: Any) -> list[tuple[int, int, int]]:
    return [(r["step"], r["rank"], r["export_sequence_idx"]) for r in read_records(path, **options)]


def test_records_come_by_step_rank_and_index(tmp_path: Path) -> None:
    for step in (10, 2):
        write_step(tmp_path, step, num_ranks=2)
    expected = [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (10, 0, 0), (10, 0, 1), (10, 1, 0), (10, 1, 1)]
    assert order(tmp_path) == expected
    assert order(tmp_path / "token_exports") == expected
    assert order(tmp_path / "token_exports" / "step_10") == expected[4:]
    assert order(tmp_path, steps={10}) == expected[4:]


def test_a_file_of_several_steps_is_ordered_too(tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", record(3), record(1, 1), record(1, 0))
    assert order(file) == [(1, 0, 0), (1, 1, 0), (3, 0, 0)]
    assert order(file, steps={3}) == [(3, 0, 0)]


def test_an_unfinished_step_is_left_out_unless_named(tmp_path: Path) -> None:
    write_step(tmp_path, 0)
    unfinished = write_step(tmp_path, 1, stable=False)
    assert order(tmp_path) == [(0, 0, 0), (0, 0, 1)]
    assert order(unfinished) == [(1, 0, 0), (1, 0, 1)]


def test_a_run_without_a_finished_step_says_how_to_read_it(tmp_path: Path) -> None:
    write_step(tmp_path, 4, stable=False)
    assert order(tmp_path) == [(4, 0, 0), (4, 0, 1)]  # another trainer's, which writes no markers
    (tmp_path / "ledger").mkdir()
    with pytest.raises(DataError, match=r"none of them finished \(no STABLE marker\); name .*step_4"):
        list(read_records(tmp_path))


def test_a_torn_last_line_is_reported_once_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "rank_0.jsonl", record(index=0), tail='{"step": 0, "token_ids": [5,')
    with caplog.at_level(logging.WARNING):
        assert order(file) == [(0, 0, 0)]
    assert [f"{file}:2 is cut short" in message for message in caplog.messages] == [True]


def test_a_last_line_without_a_line_end_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "rank_0.jsonl", record(index=0), tail=json.dumps(record(index=1)))
    assert order(file) == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1, 2], "expected one JSON object per line, got list"),
        ({"ids": [1]}, r"expected a record with token_ids .* got the keys \['ids'\]"),
        ({"tokens": [5, 9]}, r"expected an object with an id at tokens\[0\], got 5"),
        ({"token_ids": "abc"}, 'expected token_ids to be a list of integers, got "abc"'),
        ({"token_ids": [1.5]}, r"expected token_ids to be a list of integers, got \[1.5\]"),
        (record(entropy=[0.5]), "expected entropy to be a list of 2 entries, one per token, got 1 entries"),
        (record(loss_mask=True), "expected loss_mask to be a list of 2 entries, one per token, got bool"),
        (record(rank="a"), 'expected rank to be an integer, got "a"'),
    ],
)
def test_an_unknown_shape_is_an_error_with_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path / "rank_0.jsonl", record(), line)
    with pytest.raises(DataError, match=f"rank_0.jsonl:2: {message}"):
        list(read_records(file))


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "rank_0.jsonl", tail='{"token_ids": [5\n' + json.dumps(record()) + "\n")
    with pytest.raises(DataError, match=r"rank_0.jsonl:1 is not JSON"):
        list(read_records(file))


def test_the_older_form_comes_out_in_columns(tmp_path: Path) -> None:
    tokens = [
        {"id": 5, "position": 0, "loss_mask": False},
        {"id": 9, "position": 1, "loss_mask": True, "inference_logprob": -0.5, "inference_prob": 0.61},
    ]
    file = write(tmp_path / "old.jsonl", {"step": 2, "env_name": "math", "tokens": tokens})
    assert list(read_records(file)) == [
        {
            "step": 2,
            "env_name": "math",
            "token_ids": [5, 9],
            "position_ids": [0, 1],
            "loss_mask": [False, True],
            "inference_logprobs": [None, -0.5],
            "inference_prob": [None, 0.61],
        }
    ]


@pytest.mark.parametrize("tail", ["", "\n", '{"token_ids"'])
def test_an_input_without_records_is_an_error(tmp_path: Path, tail: str) -> None:
    file = write(tmp_path / "rank_0.jsonl", tail=tail)
    with pytest.raises(DataError, match="holds no token-export records"):
        list(read_records(file))


def test_what_cannot_be_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give a run"):
        list(read_records(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"expected rank_R.jsonl, found nothing"):
        list(read_records(tmp_path))
    (tmp_path / "rank_0.csv").touch()
    with pytest.raises(DataError, match=r"expected rank_R.jsonl, found rank_0.csv"):
        list(read_records(tmp_path))
    with pytest.raises(DataError, match=r"expected a .jsonl or .parquet file, got .csv"):
        list(read_records(tmp_path / "rank_0.csv"))
