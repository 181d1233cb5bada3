"""Dumps of other systems in a real browser: texts, rewards, and what they lack."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

ASKED, ANSWERED = {"role": "user", "content": "2 + 2 = ?"}, {"role": "assistant", "content": "it is 4"}


def write_lines(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_verl(folder: Path) -> Path:
    one = {"input": "2 + 2 = ?", "output": "it is 4", "gts": "four", "score": 0.75, "step": 3}
    write_lines(folder / "3.jsonl", one, one | {"output": "it is 5", "score": 0.0})
    return folder


def write_trl(folder: Path) -> Path:
    (folder / "completions").mkdir(parents=True)
    columns = {"prompt": ["2 + 2 = ?"] * 2, "completion": ["it is 4", "it is 5"], "advantage": [0.5, -0.5]}
    table = pa.table({"step": [3, 3], **columns, "exact": [0.75, 0.0]})
    pq.write_table(table, folder / "completions" / "completions_00003.parquet")
    return folder


def write_prime(folder: Path) -> Path:
    one = {"example_id": 1, "prompt": [ASKED], "completion": [ANSWERED], "reward": 0.75, "task": "math"}
    other = one | {"completion": [ANSWERED | {"content": "it is 5"}], "reward": 0.0}
    write_lines(folder / "rollouts" / "step_3" / "train_rollouts.jsonl", one, other)
    return folder


def write_inspect(folder: Path) -> Path:
    sample = {
        "id": "a",
        "epoch": 1,
        "input": "2 + 2 = ?",
        "target": "4",
        "messages": [ASKED, ANSWERED],
        "output": {"choices": [], "completion": "it is 4"},
        "scores": {"match": {"value": 0.75}},
    }
    log = {"version": 2, "eval": {"task": "sums"}, "samples": [sample]}
    folder.mkdir()
    (folder / "sums.json").write_text(json.dumps(log))
    return folder / "sums.json"


@pytest.mark.parametrize(
    ("write", "lacks"),
    [
        (write_verl, "no tokens, logprobs, advantages or masks"),
        (write_trl, "no tokens, logprobs or masks"),
        (write_prime, "no logprobs or masks of the trainer"),
        (write_inspect, "no token ids, advantages or masks"),
    ],
)
def test_a_dump_shows_its_texts_and_rewards_and_says_what_it_lacks(
    visit: Any, page_of: Any, tmp_path: Path, write: Any, lacks: str
) -> None:
    page = visit(f"{page_of(write(tmp_path / 'dump'))}#rollouts", "tr[data-row]")
    row = page.locator("tr[data-row]", has_text="it is 4")
    assert "0.750" in row.inner_text() and "2 + 2 = ?" in row.inner_text()
    row.click()
    page.wait_for_selector(".details .message")
    assert page.locator(".details .message pre").all_inner_texts()[:2] == ["2 + 2 = ?", "it is 4"]
    page.get_by_role("button", name="Step", exact=True).click()
    notice = page.locator(".notice")
    assert "No tokens are exported" in notice.inner_text() and lacks in notice.inner_text()
    assert "`" not in notice.inner_text()
    notice.get_by_role("button", name="look at the rollouts").click()
    page.wait_for_selector("tr[data-row]")


def test_a_trace_shows_its_tokens_and_says_what_was_not_recorded(
    visit: Any, page_of: Any, tmp_path: Path
) -> None:
    trace = {
        "id": "t0",
        "task": {"data": {"idx": 5}},
        "nodes": [
            {"parent": None, "message": ASKED, "token_ids": [1, 2], "mask": [False, False], "logprobs": []},
            {
                "parent": 0,
                "message": ANSWERED,
                "token_ids": [4, 5, 6],
                "mask": [False, True, True],
                "logprobs": [-0.5, -0.25],
            },
        ],
        "rewards": {"exact": {"score": 0.75, "weight": 1.0}},
    }
    write_lines(tmp_path / "traces.jsonl", trace)
    page = visit(f"{page_of(tmp_path / 'traces.jsonl')}#record", ".token")
    assert page.locator(".token").all_inner_texts() == ["#1", "#2", "#4", "#5", "#6"]
    assert page.locator(".gutter b").all_inner_texts() == ["user", "assistant"]
    assert "0.75" in page.locator(".record-head .facts").inner_text()
    assert page.locator(".look-none").inner_text() == "Mismatch KL is not recorded"
    page.locator('.token[data-i="4"]').click()
    details = page.locator(".details-body").inner_text()
    assert "−0.25" in details and "trainer logprob" in details and "not recorded" in details
