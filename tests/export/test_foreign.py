"""Dumps of other systems come out as rollouts, or as records where they have tokens.

The small files follow each system's documentation; `test_trls_own_log` has TRL write one.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pellucid.export
from pellucid.errors import DataError
from pellucid.export import dumps
from pellucid.export.dumps import find_dump, read_dump
from pellucid.export.foreign import format_of

USER, REPLY = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}

VERL = {"input": "user\n2 + 2", "output": "is 4", "gts": "4", "score": 1.0, "step": 7, "acc": True}
VERIFIERS = {
    "example_id": 3,
    "prompt": [USER],
    "completion": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": '{"a": 2}'}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "four"}]},
        REPLY,
    ],
    "reward": 0.75,
    "metrics": {"correct": 1.0, "format": 0.5},
    "task": "math",
    "is_completed": True,
    "is_truncated": False,
    "stop_condition": "max_turns_reached",
    "timing": {"start_time": 0.0},
    "token_usage": {"input_tokens": 9, "output_tokens": 5},
    "error": None,
}
TRACE = {
    "id": "t0",
    "task": {"type": "x", "data": {"idx": 5, "prompt": "2 + 2"}},
    "nodes": [
        {"parent": None, "message": USER, "token_ids": [1, 2, 3], "mask": [False] * 3, "logprobs": []},
        {
            "parent": 0,
            "message": REPLY,
            "sampled": True,
            "token_ids": [4, 5, 6],
            "mask": [False, True, True],
            "logprobs": [-0.5, -0.25],
        },
        {
            "parent": 0,
            "message": REPLY | {"content": "five"},
            "sampled": True,
            "token_ids": [7],
            "mask": [True],
            "logprobs": [-2.0],
        },
    ],
    "rewards": {"correct": {"score": 1.0, "weight": 2.0}, "short": {"score": 0.5, "weight": 1.0}},
    "metrics": {"turns": 1.0},
    "info": {"env_name": "math", "group_id": "g1", "advantage": 0.25},
    "run": {"type": "train", "id": "r", "step": 4},
    "stop_condition": "done",
    "errors": [],
    "ok": True,
}
SAMPLE = {
    "id": "a",
    "epoch": 2,
    "input": "2 + 2",
    "target": "4",
    "messages": [USER, REPLY],
    "output": {
        "model": "m",
        "choices": [
            {
                "message": REPLY,
                "stop_reason": "stop",
                "logprobs": {"content": [{"token": "4", "logprob": -0.25}, {"token": "!", "logprob": -1.75}]},
            }
        ],
        "completion": "4",
        "usage": {"input_tokens": 8, "output_tokens": 2},
    },
    "scores": {"match": {"value": "C", "answer": "4"}, "judge": {"value": {"tone": 0.5}}},
    "uuid": "u1",
}
LOG = {"version": 2, "status": "success", "eval": {"task": "sums", "model": "m"}, "samples": [SAMPLE]}


def write_lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_completions(path: Path, step: int, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = len(next(iter(columns.values())))
    pq.write_table(pa.table({"step": [step] * rows, **columns}), path)
    return path


def write_archive(path: Path, *samples: dict[str, Any], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "sums"}}))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
    return path


def rollouts(path: Path) -> dict[int, list[dict[str, Any]]]:
    dump = find_dump(path)
    assert dump is not None and dump.problems == {}
    return {step: list(dump.rollouts(step)) for step in dump.steps()}


def test_verls_dump_has_a_file_per_step(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "10.jsonl", VERL | {"step": 10, "score": 0.0, "output": "is 5"}, VERL | {"step": 10}
    )
    write_lines(tmp_path / "7.jsonl", VERL)
    found = rollouts(tmp_path)
    assert list(found) == [7, 10] and [one["reward"] for one in found[10]] == [0.0, 1.0]
    [one] = found[7]
    assert one["messages"] == [
        {"role": "user", "content": "user\n2 + 2"},
        {"role": "assistant", "content": "is 4"},
    ]
    assert one["metrics"] == {"acc": 1.0} and one["extra"] == {"gts": "4"} and one["outcome"] == "sent"
    assert len({rollout["group_id"] for rollout in found[10]}) == 1  # one prompt
    dump = find_dump(tmp_path)
    assert dump is not None and "no tokens, logprobs, advantages or masks" in dump.lacks
    assert dump.means() == {"reward/all": {7: 1.0, 10: 0.5}, "metrics/acc": {7: 1.0, 10: 1.0}}
    assert dump.outcomes() == {7: {"sent": 1}, 10: {"sent": 2}}


def test_a_file_may_hold_several_steps(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "all.jsonl", VERL, VERL | {"step": 8, "uid": "g"}, VERL)
    found = rollouts(path)
    assert {step: len(ones) for step, ones in found.items()} == {7: 2, 8: 1}
    assert found[8][0]["group_id"] == "g"


def test_a_dump_that_grows_is_read_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "7.jsonl", VERL)
    dump = find_dump(tmp_path)
    assert dump is not None and list(dump.steps()) == [7]
    path.write_text(path.read_text() + json.dumps(VERL | {"step": 8}) + '\n{"input": "half')
    assert list(dump.steps()) == [7, 8] and dump.problems == {}


def test_trls_log_has_a_column_per_reward_function(tmp_path: Path) -> None:
    texts = {"prompt": ["a", "a"], "completion": ["x", "y"], "advantage": [0.5, -0.5]}
    write_completions(tmp_path / "completions" / "completions_00002.parquet", 2, **texts, exact=[1.0, 0.0])
    write_completions(
        tmp_path / "completions" / "completions_00010.parquet",
        10,
        prompt=[[USER], [USER]],
        completion=[[REPLY], [REPLY]],
        exact=[1.0, None],
        length=[0.25, 0.5],
        note=["good", ""],
        advantage=[0.1, 0.2],
    )
    found = rollouts(tmp_path)  # TRL's output_dir
    assert [one["reward"] for one in found[2]] == [1.0, 0.0]  # one function: its value is the reward
    assert [one["advantage"] for one in found[2]] == [0.5, -0.5]
    first, second = found[10]
    assert first["messages"] == [USER, REPLY] and "reward" not in first  # the weights are not in the log
    assert first["metrics"] == {"exact": 1.0, "length": 0.25} and first["extra"] == {"note": "good"}
    assert second["metrics"] == {"length": 0.5} and second["extra"] == {}
    assert find_dump(tmp_path / "completions") is not None


def test_prime_rls_saved_rollouts(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "step_3" / "train_rollouts.jsonl", VERIFIERS, VERIFIERS | {"error": "Timeout"}
    )
    one, failed = rollouts(path)[3]
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [message["content"] for message in one["messages"]] == ["2 + 2", 'add({"a": 2})', "four", "4"]
    assert (one["reward"], one["example_id"], one["env_name"], one["num_tokens"]) == (0.75, 3, "math", 5)
    assert one["metrics"] == {"correct": 1.0, "format": 0.5} and one["stop_reason"] == "max_turns_reached"
    assert failed["outcome"] == "failed_rollout" and failed["error"] == "Timeout"


@pytest.mark.parametrize("is_episode", [False, True])
def test_traces_have_a_record_per_branch(tmp_path: Path, is_episode: bool) -> None:
    episode = {
        "id": "e",
        "env": {"id": "x", "name": "arithmetic"},
        "task": TRACE["task"],
        "group": {"id": "g9"},
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 6}},
        "traces": [{key: value for key, value in TRACE.items() if key not in ("info", "run")}],
        "ok": True,
    }
    path = write_lines(tmp_path / "traces.jsonl", episode if is_episode else TRACE, TRACE | {"id": "t1"})
    step = 6 if is_episode else 4
    one = rollouts(path)[step][0]
    assert (one["reward"], one["num_tokens"], one["example_id"]) == (2.5, 3, 5)
    assert one["metrics"] == {"turns": 1.0, "reward/correct": 1.0, "reward/short": 0.5}
    assert (one["env_name"], one["group_id"]) == (("arithmetic", "g9") if is_episode else ("math", "g1"))
    dump = find_dump(path)
    assert dump is not None and dump.has_tokens()
    export = pellucid.export.open(path)
    assert export.steps == ((4, 6) if is_episode else (4,))
    records = export.step(step)
    assert records[0]["token_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert records[1]["token_ids"].tolist() == [1, 2, 3, 7]
    assert records[0]["loss_mask"].tolist() == [False, False, False, False, True, True]
    np.testing.assert_array_equal(records[0]["inference_logprobs"], [np.nan] * 4 + [-0.5, -0.25])
    assert records[1]["inference_logprobs"].tolist()[-1] == -2.0
    assert records[0]["role_spans"] == [["user", 0, 3], ["assistant", 3, 6]]
    assert (records[0]["reward"], records[0]["rollout_id"], records[0]["advantage"]) == (
        (2.5, "t0", None if is_episode else 0.25)
    )
    assert [len(record["token_ids"]) for record in export.records()] == [6, 4, 6, 4][::1]
    assert len({record.key for record in export.records()}) == 4


def test_traces_without_tokens_are_texts(tmp_path: Path) -> None:
    bare = [{key: node[key] for key in ("parent", "message")} for node in TRACE["nodes"]]  # type: ignore[attr-defined]
    path = write_lines(tmp_path / "traces.jsonl", TRACE | {"nodes": bare})
    dump = find_dump(path)
    assert dump is not None and not dump.has_tokens() and list(dump.steps()) == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": 1}, r"nodes\[1\]: expected parent to be the number of a node before, got 1"),
        ({"parent": "x"}, r"nodes\[1\]: expected parent .* got 'x'"),
        ({"mask": [True]}, "a node has 3 token_ids and a mask of 1"),
        ({"token_ids": ["a", "b", "c"]}, "expected token_ids to be a list of integers"),
    ],
)
def test_a_trace_that_contradicts_itself_is_named(tmp_path: Path, changes: Any, message: str) -> None:
    nodes = [TRACE["nodes"][0], TRACE["nodes"][1] | changes]  # type: ignore[index]
    path = write_lines(tmp_path / "traces.jsonl", TRACE | {"nodes": nodes})
    with pytest.raises(DataError, match=f"traces.jsonl:1: {message}"):
        pellucid.export.open(path).records()


@pytest.mark.parametrize("form", ["json", "deflated", "stored"])
def test_inspect_logs(tmp_path: Path, form: str) -> None:
    failed = SAMPLE | {"id": "b", "uuid": None, "messages": [], "scores": {}, "error": {"message": "lost"}}
    if form == "json":
        (tmp_path / "log.json").write_text(json.dumps(LOG | {"samples": [SAMPLE, failed]}, indent=2))
    else:
        method = zipfile.ZIP_DEFLATED if form == "deflated" else zipfile.ZIP_STORED
        write_archive(tmp_path / "log.eval", SAMPLE, failed, method=method)
    one, other = rollouts(tmp_path)[0]
    assert one["messages"] == [USER, REPLY] and one["env_name"] == "sums"
    assert one["metrics"] == {"score/match": 1.0, "score/judge/tone": 0.5, "logprob/mean": -1.0}
    assert (one["reward"], one["num_tokens"], one["stop_reason"]) == (1.0, 2, "stop")
    assert (one["example_id"], one["group_id"], one["rollout_id"]) == ("a", "a", "u1")
    assert one["extra"] == {"target": "4"} and one["outcome"] == "eval"
    assert other["messages"] == [USER, REPLY] and other["rollout_id"] == "b/2"
    assert (other["outcome"], other["error"], other["reward"]) == ("failed_rollout", "lost", None)


def test_an_archive_may_be_packed_by_zstd(tmp_path: Path) -> None:
    """As inspect writes it: zipfile of Python 3.11 cannot."""
    path = write_archive(tmp_path / "log.eval", SAMPLE, method=zipfile.ZIP_STORED)
    packed = pack_by_zstd(path)
    path.write_bytes(packed)
    [one] = rollouts(path)[0]
    assert one["messages"] == [USER, REPLY]
    path.write_bytes(packed.replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfc"))
    with pytest.raises(DataError, match=r"header.json is damaged"):
        list(read_dump(path))


def pack_by_zstd(path: Path) -> bytes:
    """Writes the same archive with compression method 93, byte by byte."""
    files, directory, names = b"", b"", []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            data = archive.read(entry)
            packed = pa.compress(data, codec="zstd", asbytes=True)
            name = entry.filename.encode()
            sizes = b"".join(number.to_bytes(4, "little") for number in (entry.CRC, len(packed), len(data)))
            common = b"\x3f\x00\x00\x00" + (93).to_bytes(2, "little") + b"\x00\x00\x21\x00" + sizes
            common += len(name).to_bytes(2, "little") + b"\x00\x00"
            at = len(files).to_bytes(4, "little")
            files += b"PK\x03\x04" + common + name + packed
            directory += b"PK\x01\x02\x3f\x00" + common + b"\x00" * 10 + at + name
            names.append(name)
    count = len(names).to_bytes(2, "little") * 2
    end = len(directory).to_bytes(4, "little") + len(files).to_bytes(4, "little") + b"\x00\x00"
    return files + directory + b"PK\x05\x06\x00\x00\x00\x00" + count + end


def test_logs_of_a_folder_are_steps_in_the_order_of_their_names(tmp_path: Path) -> None:
    for day, grade in ((1, "I"), (2, "C")):
        sample = SAMPLE | {"scores": {"match": {"value": grade}}}
        write_archive(tmp_path / f"2026-11-0{day}T00-00_sums_x.eval", sample)
    assert [[one["reward"] for one in ones] for ones in rollouts(tmp_path).values()] == [[0.0], [1.0]]


@pytest.mark.parametrize(
    "record",
    [
        {"step": 0, "token_ids": [1], "prompt": "", "completion": "", "reward": 1},
        {"input": "a", "output": "b"},
        {"prompt": "a", "completion": "b"},
        {"outcome": "sent", "rollout_id": "r", "prompt": "", "completion": "", "reward": 0},
        ["input", "output", "score", "step"],
        None,
    ],
)
def test_what_is_not_known_has_no_format(record: Any, tmp_path: Path) -> None:
    assert format_of(record) is None
    assert find_dump(write_lines(tmp_path / "a.jsonl", record)) is None


def test_hostile_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path / "big.eval", SAMPLE)
    write_completions(
        tmp_path / "big.parquet", 0, prompt=["a" * 999], completion=["b"], advantage=[0.0], f=[1.0]
    )
    (tmp_path / "big.json").write_text(json.dumps(LOG))
    (tmp_path / "torn.eval").write_bytes((tmp_path / "big.eval").read_bytes()[:-9])
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "big.parquet").read_bytes()[:-9])
    (tmp_path / "other.eval").write_bytes(b"PK\x05\x06" + b"\x00" * 18)
    (tmp_path / "list.json").write_text('[1, "eval", "version"]')
    for name in ("torn.eval", "torn.parquet", "other.eval", "list.json"):
        with pytest.raises(DataError, match=name):
            list(read_dump(tmp_path / name))
        if not name.endswith(".eval"):
            assert find_dump(tmp_path / name) is None
    for limit in ("MAX_SAMPLE_BYTES", "MAX_GROUP_BYTES", "MAX_LOG_BYTES"):
        monkeypatch.setattr(dumps, limit, 100)
    for name in ("big.eval", "big.parquet", "big.json"):
        with pytest.raises(DataError, match="at most 100"):
            list(read_dump(tmp_path / name))


def test_a_damaged_file_is_a_problem_and_the_others_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "7.jsonl", VERL, {"input": 1})
    write_lines(tmp_path / "8.jsonl", VERL | {"step": 8})
    dump = find_dump(tmp_path)
    assert dump is not None
    assert {step: len(list(dump.rollouts(step))) for step in dump.steps()} == {7: 1, 8: 1}
    [problem] = dump.problems
    assert "7.jsonl, record 1: expected verl's rollout dump, got ['input']" in problem
