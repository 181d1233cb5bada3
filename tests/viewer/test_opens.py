"""`pellucid view` opens whatever a run left: with or without an export, parts of it, folders of runs."""

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pellucid.config.tools import ViewSettings
from pellucid.errors import ConfigError, DataError
from pellucid.viewer import run_view
from pellucid.viewer.access import Exports, RunFolder
from pellucid.viewer.page import write_page
from pellucid.viewer.rollouts import MAX_TEXT, SavedRollouts
from pellucid.viewer.runs import describe, find_runs
from pellucid.viewer.server import make_app, make_list_app
from pellucid.viewer.source import ServedRun


@pytest.fixture
def bare(made_run: Any, rollout: Any, save_rollouts: Any, tmp_path: Path) -> Path:
    """A run without an export."""
    folder = tmp_path / "runs" / "bare"
    shutil.copytree(made_run.folder, folder)
    shutil.rmtree(folder / "token_exports")
    save_rollouts(folder, 0, rollout(0, "sent"), rollout(1, "zero_advantage"))
    save_rollouts(folder, 1, rollout(2, "stale"), rollout(3, "failed_rollout"), "no rollout")
    return folder


def view(path: Path | None, **options: Any) -> None:
    run_view(ViewSettings(path=path, **options))


def test_a_run_without_an_export_has_its_metrics_ledger_and_rollouts(bare: Path, capsys: Any) -> None:
    client = TestClient(make_app(run := ServedRun(Exports(bare))), base_url="http://127.0.0.1:7357")
    run.summarise_once()
    head = client.get("/api/run").json()
    assert (head["held"], head["kind"], head["in_run"]) == ([], "rl", True)
    assert head["rollouts"] == {"0": {"sent": 1, "zero_advantage": 1}, "1": {"stale": 1, "failed_rollout": 1}}
    assert head["ledger"]["balanced"] and head["metrics"]["reward/all"][:2] == [[0, 0.4], [1, 0.5]]
    assert client.get("/api/metrics").json()["reward/math"] == [[0, 0.5], [1, 0.5], [2, 0.5]]
    rows = client.get("/api/rollouts/1").json()
    assert [(row["rollout"], row["reason"], row["version"]) for row in rows] == [
        ("r2", "because of stale", 3),
        ("r3", "because of failed_rollout", 3),
    ]
    assert rows[0]["messages"] == [["user", "2 + 2"], ["assistant", "is 2"]]
    assert rows[0]["metrics"] == {"exact": 1.0}
    view(bare, terminal=True)
    shown = capsys.readouterr().out
    assert "`pellucid rl … --export` writes them" in shown
    assert "because of stale" in shown and "reward/math" in shown and "balanced" in shown
    page = write_page(Exports(bare), bare.parent / "page.html")
    assert (page.num_records, page.is_whole) == (0, True)
    with pytest.raises(DataError, match="has no token export, so there are no records of step 1"):
        view(bare, step=1, terminal=True)
    with pytest.raises(ConfigError, match="--record-index 2: .* has no token export"):
        view(bare, record_index=2, terminal=True)


def test_a_running_run_opens_before_its_first_step_and_follows(bare: Path, made_run: Any) -> None:
    exports = Exports(bare)
    run = ServedRun(exports)
    assert exports.steps() == [] and run.pulse()["writing"]
    before = run.pulse()["state"]
    shutil.copytree(made_run.folder / "token_exports" / "step_0", bare / "token_exports" / "step_0")
    (bare / "token_exports" / "step_0" / "STABLE").unlink()
    assert exports.steps() == []
    (bare / "token_exports" / "step_0" / "STABLE").touch()
    assert exports.steps() == [0]
    assert run.pulse()["state"] != before


def test_it_is_live_only_while_something_writes(bare: Path) -> None:
    folder = RunFolder(bare)
    assert folder.is_being_written(time.time())
    for path in (bare, *bare.rglob("*")):
        os.utime(path, (1_000, 1_000))
    assert not folder.is_being_written(time.time())
    assert folder.written_at() == 1_000


def test_parts_of_a_run_stand_for_the_run(bare: Path, capsys: Any) -> None:
    for part in ("rollouts", "metrics", "ledger"):
        view(bare / part, terminal=True)
        assert "because of stale" in capsys.readouterr().out


def test_a_folder_of_runs_is_listed_and_each_opens(bare: Path, made_run: Any, capsys: Any) -> None:
    shutil.copytree(made_run.folder, bare.parent / "<b>")
    folder = bare.parent
    runs = find_runs(folder)
    assert {run.name for run in runs} == {"bare", "<b>"}
    told = {run.name: describe(run, folder) for run in runs}
    assert told["bare"]["tokens"] == "no export" and told["<b>"]["tokens"] == "exported"
    assert told["bare"]["steps"] == "3" and told["bare"]["last"] == "reward 0.6"
    app = make_list_app(folder, runs, lambda run: ServedRun(Exports(run), home="../"))
    client = TestClient(app, base_url="http://127.0.0.1:7357")
    page = client.get("/").text
    assert "&lt;b&gt;</a>" in page and "<b>" not in page
    for number, run in enumerate(runs):
        head = client.get(f"/{number}/api/run").json()
        assert (head["name"], head["home"]) == (run.name, "../")
        assert 'id="run" data-served' in client.get(f"/{number}/").text
        assert client.get(f"/{number}/api/step/77").status_code == 404
    assert client.get("/2/api/run").status_code == 404
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    view(folder, terminal=True)
    assert "no export" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--output writes a page of one run; .* has 2: "):
        view(folder, output=folder / "page.html")
    with pytest.raises(ConfigError, match="--step, --rank, .* are of one run; name it: "):
        view(folder, step=1)


def test_without_a_path_it_lists_the_runs_here_and_in_outputs(
    bare: Path, monkeypatch: Any, capsys: Any
) -> None:
    place = bare.parents[1]
    (place / "outputs").mkdir()
    bare.rename(place / "outputs" / "mine")
    monkeypatch.chdir(place)
    view(None)
    shown = capsys.readouterr().out
    assert "outputs/mine" in shown and "pellucid view outputs/mine" in shown
    shutil.rmtree(place / "outputs")
    with pytest.raises(DataError, match=r"there is no run in .*`pellucid view PATH`"):
        view(None)


def test_steps_of_another_trainer_need_no_marker(made_run: Any, tmp_path: Path) -> None:
    for step in (0, 1):
        shutil.copytree(made_run.folder / "token_exports" / f"step_{step}", tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "STABLE").unlink()
    assert Exports(tmp_path).steps() == [0, 1]
    assert len(Exports(tmp_path).records(1)) == 16
    nested = tmp_path / "a" / "b"
    nested.mkdir(parents=True)
    for step in (0, 1):
        shutil.move(tmp_path / f"step_{step}" / "rank_0.jsonl", nested / f"of_{step}.jsonl")
        (tmp_path / f"step_{step}").rmdir()
    assert Exports(tmp_path).steps() == [0, 1]


def test_what_is_neither_run_nor_export_is_an_error(tmp_path: Path, made_run: Any, caplog: Any) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"holds no \.jsonl or \.parquet token export; .* found notes\.txt"):
        view(tmp_path, terminal=True)
    (tmp_path / "a.jsonl").write_text('{"word": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl"):
        view(tmp_path, terminal=True)
    with pytest.raises(ConfigError, match="--record-index 16: step 2 has 16 records, from 0 on"):
        view(made_run.folder, record_index=16, terminal=True)
    with pytest.raises(ConfigError, match=r"is a folder; name a file, such as .*page\.html"):
        view(made_run.folder, output=tmp_path)
    with caplog.at_level(logging.INFO):
        view(made_run.folder, output=tmp_path / "page.html", record_index=15)
    assert "48 of 48 records" in caplog.text


def test_rollouts_of_any_shape_are_rows(rollout: Any, save_rollouts: Any, tmp_path: Path) -> None:
    long = "x" * (MAX_TEXT + 5)
    odd = {"outcome": 3, "messages": [1, {"role": "user", "content": [{"text": "a"}, "b"]}], "reward": "high"}
    cut = rollout(0, "sent", messages=[{"role": "user", "content": long}], metrics=7)
    save_rollouts(tmp_path, 4, odd, cut, [1])
    saved = SavedRollouts(tmp_path, seq_len=8)
    first, second = saved.rows(4)
    assert (first["outcome"], first["reward"], first["messages"]) == ("3", None, [["user", "a\nb"]])
    assert "\n… 5 characters are left out …\n" in second["messages"][0][1]
    assert (second["truncated"], second["metrics"]) == (2, {})  # 6 + 4 tokens, 8 fit
    assert saved.counts() == {"4": {"3": 1, "sent": 1, "truncated": 1}}
    assert SavedRollouts(None).counts() == {} == SavedRollouts(tmp_path / "none").counts()
