"""The page as a file: its policy, its data, its notes; nothing of a run is ever markup."""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pellucid.errors import DataError, ModelError
from pellucid.viewer import run_view
from pellucid.viewer.collect import collect
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.spread import Size


def source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_allows_exactly_the_inlined_script_and_style(
    write_run: Any, settings: Any, read_page: Any
) -> None:
    run = write_run()
    run_view(settings(run))
    html = read_page(run / "page.html").html
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert policy == (
        f"default-src 'none'; script-src '{source_hash(script)}'; style-src '{source_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    assert not re.search(r"""\b(src|href)=|url\(|@import|\sstyle=|\son\w+=""", html)
    assert "/* palette" not in style and "{{" not in html


def test_hostile_text_never_reaches_the_markup(
    write_run: Callable[..., Path], settings: Any, read_page: Any, hostile: str, tokenizer_folder: Path
) -> None:
    name = hostile.replace("/", "")
    run = write_run(name=name, env_name=hostile, example_id=hostile, role_spans=[[hostile, 0, 12]])
    run_view(settings(run, tokenizer=str(tokenizer_folder)))
    page = read_page(run / "page.html")
    assert page.head["name"] == name
    assert hostile in page.head["vocabulary"]["texts"]
    assert page.head["rows"]["env"] == [hostile] * 4
    assert page.records[0]["fields"]["example_id"] == hostile
    assert page.records[0]["segments"] == [[hostile, 0, 12]]
    assert "<img" not in page.html and "onerror" not in page.html
    assert page.html.count("<script") == page.html.count("</script") == 2


def test_the_data_decodes_to_the_recorded_numbers(
    write_run: Any, settings: Any, read_page: Any, make_record: Any
) -> None:
    run = write_run()
    run_view(settings(run))
    page = read_page(run / "page.html")
    recorded = make_record()
    columns = page.records[0]["columns"]
    assert columns["token_ids"] == recorded["token_ids"]
    assert columns["loss_mask"] == [0] * 9 + [1] * 3
    assert columns["advantages"] == 0.5
    assert columns["is_masked_low"] == 0
    assert columns["trainer_logprobs"][0] is None
    assert "entropy" not in columns
    for name in ("inference_logprobs", "trainer_logprobs", "mismatch_kl", "prob_delta"):
        packed = np.broadcast_to(np.array(columns[name], np.float64), 12)
        expected = np.array(recorded[name], np.float64)
        is_single = np.array_equal(expected, expected.astype(np.float32), equal_nan=True)
        assert is_single == name.endswith("logprobs")
        exact = packed.astype(np.float32).astype(np.float64) if is_single else packed
        assert np.array_equal(exact, expected, equal_nan=True), name


def test_rows_summarise_trainable_tokens_only(write_run: Any, settings: Any, read_page: Any) -> None:
    run = write_run(num_steps=1, num_records=1)
    run_view(settings(run))
    head = read_page(run / "page.html").head
    assert {name: values[0] for name, values in head["rows"].items()} == {
        "step": 0,
        "env": "reverse-text",
        "reward": 1.0,
        "advantage": 0.5,
        "tokens": 12,
        "trainable": 3,
        "kl_mean": 0.25,
        "kl_max": 0.5,
        "masked": 1,
    }
    assert head["totals"] == {"steps": 1, "records": 1, "tokens": 12}
    assert head["scale"] == {"low": 1e-4, "high": pytest.approx(0.475), "classes": 10}


def test_columns_without_meaning_are_none_not_zero(write_run: Any, settings: Any, read_page: Any) -> None:
    absent = [None] * 12
    run = write_run(1, 1, training_mode="sft", mismatch_kl=absent, is_masked=absent, rewards=absent)
    run_view(settings(run))
    page = read_page(run / "page.html")
    row = {name: values[0] for name, values in page.head["rows"].items()}
    assert [row[name] for name in ("reward", "kl_mean", "kl_max", "masked")] == [None] * 4
    assert page.records[0]["columns"]["mismatch_kl"] is None


def test_what_is_left_out_is_said(write_run: Any) -> None:
    run = write_run(num_steps=10, num_records=3)
    page = collect(run, RunFolder.around(run), None, Size(records=9, tokens=1000))
    assert page.head["rows"]["step"] == [0] * 3 + [4] * 3 + [9] * 3
    assert len(page.records) == 9
    assert page.head["totals"]["records"] == 30
    assert page.head["notes"][0].startswith("This page shows 9 of 30 records, from 3 of 10 steps: the first,")


def test_a_complete_page_with_text_has_no_notes(
    write_run: Any, settings: Any, read_page: Any, tokenizer_folder: Path
) -> None:
    run = write_run()
    (run / "configs").mkdir()
    (run / "configs" / "rl.toml").write_text(f"[model]\nname = '{tokenizer_folder}'\n")
    run_view(settings(run))
    page = read_page(run / "page.html")
    assert page.head["notes"] == []
    assert page.records[0]["segments"] == [["user", 0, 6], ["assistant", 6, 12]]


def test_ids_stand_in_for_text_and_the_page_says_so(write_run: Any, settings: Any, read_page: Any) -> None:
    run = write_run()
    run_view(settings(run))
    head = read_page(run / "page.html").head
    assert head["vocabulary"]["texts"][:2] == ["#1", "#2"]
    assert head["notes"] == [
        "Tokens are shown as ids: no tokenizer was given and none was found; "
        "pass --tokenizer with a folder or hub name to see text."
    ]


def test_a_tokenizer_that_was_asked_for_must_load(write_run: Any, settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        run_view(settings(write_run(), tokenizer=str(tmp_path)))


def test_a_torn_line_is_logged_once_and_on_the_page(
    write_run: Any, settings: Any, read_page: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(num_steps=1)
    with (run / "token_exports" / "step_0" / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 0, "tok')
    with caplog.at_level(logging.WARNING):
        run_view(settings(run))
    assert ["rank_0.jsonl:3 is cut short" in message for message in caplog.messages] == [True]
    assert "rank_0.jsonl:3 is cut short" in read_page(run / "page.html").head["notes"][-1]


def test_the_page_lies_in_the_run_or_beside_the_input_or_where_asked(
    write_run: Any, settings: Any, tmp_path: Path
) -> None:
    run = write_run()
    exports = run / "token_exports"
    for path, page in [
        (run, run / "page.html"),
        (exports, run / "page.html"),
        (exports / "step_1", exports / "page.html"),
        (exports / "step_1" / "rank_0.jsonl", exports / "step_1" / "page.html"),
    ]:
        run_view(settings(path))
        assert page.is_file()
        page.unlink()
    run_view(settings(run, output=tmp_path / "new" / "mine.html"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.html"]


def test_no_records_give_an_error_and_no_page(settings: Any, tmp_path: Path) -> None:
    empty = tmp_path / "rank_0.jsonl"
    empty.touch()
    with pytest.raises(DataError, match="holds no token-export records"):
        run_view(settings(empty))
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.jsonl"]


def test_a_column_of_words_is_an_error_that_names_the_record(settings: Any, tmp_path: Path) -> None:
    file = tmp_path / "rank_0.jsonl"
    file.write_text(json.dumps({"step": 3, "token_ids": [1, 2], "entropy": ["a", "b"]}) + "\n")
    with pytest.raises(DataError, match="rank_0.jsonl:1: entropy is not a list of numbers"):
        run_view(settings(file))
