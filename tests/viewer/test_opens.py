"""`pellucid view` opens whatever a run left: with or without an export, parts of it, folders of runs."""

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import pellucid.export
from pellucid.config.tools import ViewSettings
from pellucid.errors import ConfigError, DataError
from pellucid.viewer import run_view
from pellucid.viewer.access import Exports, RunFolder
from pellucid.viewer.page import write_page
from pellucid.viewer.rollouts import MAX_TEXT, SavedRollouts
from pellucid.viewer.server import make_app
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
    assert rows[0]["messages"] == [
        {"role": "user", "text": "2 + 2"},
        {"role": "assistant", "text": "is 2"},
    ]
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
    (bare / "logs").mkdir()
    outcome = bare / "logs" / "OUTCOME"
    outcome.touch()
    assert folder.is_being_written(time.time())
    outcome.write_text("finished")
    os.utime(outcome, (folder.written_at(), folder.written_at()))
    assert not folder.is_being_written(time.time())
    os.utime(outcome, (1_000, 1_000))  # and then something else wrote to it
    assert folder.is_being_written(time.time())
    for path in (bare, *bare.rglob("*")):
        os.utime(path, (1_000, 1_000))
    assert not folder.is_being_written(time.time())
    assert folder.written_at() == 1_000


def test_parts_of_a_run_stand_for_the_run(bare: Path, capsys: Any) -> None:
    for part in ("rollouts", "metrics", "ledger"):
        view(bare / part, terminal=True)
        assert "because of stale" in capsys.readouterr().out


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
    assert (first["outcome"], first["reward"]) == ("3", None)
    assert first["messages"] == [{"role": "user", "text": "a\nb"}]
    assert "\n… 5 characters are left out …\n" in second["messages"][0]["text"]
    assert (second["truncated"], second["metrics"]) == (2, {})  # 6 + 4 tokens, 8 fit
    assert saved.counts() == {"4": {"3": 1, "sent": 1, "truncated": 1}}
    assert SavedRollouts(None).counts() == {} == SavedRollouts(tmp_path / "none").counts()


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trace(name: str, **changes: Any) -> dict[str, Any]:
    """One of prime-rl's, of two messages with tokens."""
    nodes = [
        {
            "parent": None,
            "message": {"role": "user", "content": "2 + 2"},
            "token_ids": [1, 2],
            "mask": [False] * 2,
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": f"reply of {name}"},
            "token_ids": [3, 4],
            "mask": [False, True],
            "logprobs": [-0.5],
        },
    ]
    info = {"env_name": "math", "group_id": "g", "advantage": 0.5}
    rewards = {"exact": {"score": 1.0, "weight": 1.0}}
    return {"id": name, "nodes": nodes, "rewards": rewards, "info": info, "ok": True} | changes


def test_a_dump_of_another_system_opens_as_rollouts(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    one = {"input": "2 + 2", "output": "is 4", "gts": "4", "score": 1.0, "step": 7, "acc": 0.5}
    dump = tmp_path / "dump"
    lines(dump / "7.jsonl", one)
    lines(dump / "8.jsonl", one | {"step": 8, "score": 0.25}, one | {"step": 8})
    client = TestClient(make_app(run := ServedRun(Exports(dump))), base_url="http://127.0.0.1:7357")
    run.summarise_once()
    head = client.get("/api/run").json()
    assert (head["held"], head["in_run"], head["name"]) == ([], False, "dump")
    assert head["lacks"].startswith("verl's rollout dump has texts and scores, but no tokens")
    assert head["rollouts"] == {"7": {"sent": 1}, "8": {"sent": 2}}
    assert head["metrics"]["reward/all"] == [[7, 1.0], [8, 0.625]]
    assert client.get("/api/metrics").json()["metrics/acc"] == [[7, 0.5], [8, 0.5]]
    first, _ = client.get("/api/rollouts/8").json()
    assert [(each["role"], each["text"]) for each in first["messages"]] == [
        ("user", "2 + 2"),
        ("assistant", "is 4"),
    ]
    assert first["reward"] == 0.25
    assert first["extra"] == {"gts": "4"} and first["metrics"] == {"acc": 0.5}
    lines(dump / "9.jsonl", one | {"step": 9})
    run.summarise_once()
    assert client.get("/api/run").json()["rollouts"]["9"] == {"sent": 1}  # it follows
    view(dump, terminal=True)
    shown = capsys.readouterr().out
    assert "no tokens, logprobs, advantages or masks" in " ".join(shown.split()) and "is 4" in shown
    assert "--tokenizer" not in shown
    with caplog.at_level(logging.INFO):
        view(dump / "7.jsonl", output=tmp_path / "page.html")
    assert "page.html: 1 rollouts and no tokens, " in caplog.text
    with pytest.raises(
        DataError, match="is verl's rollout dump: it has no tokens, so there are no records of step 7"
    ):
        view(dump, step=7, terminal=True)
    (dump / "8.jsonl").write_text("{")
    (dump / "7.jsonl").unlink()
    (dump / "9.jsonl").unlink()
    with pytest.raises(DataError, match="holds no records"):
        view(dump, terminal=True)


def test_traces_open_with_their_tokens_and_as_rollouts(tmp_path: Path) -> None:
    path = lines(tmp_path / "traces.jsonl", trace("a"), trace("b", rewards={"exact": {"score": 0.0}}))
    exports = Exports(path)
    assert exports.steps() == [0] and exports.records(0).column("reward").tolist() == [1.0, 0.0]
    client = TestClient(make_app(run := ServedRun(exports)), base_url="http://127.0.0.1:7357")
    run.summarise_once()
    head = client.get("/api/run").json()
    assert head["held"] == [0] and head["rollouts"] == {"0": {"sent": 2}}
    point = head["steps"][0]["points"]["all"]
    assert (point["tokens"], point["trainable"], point["kl_mean"], point["masked_high"]) == (8, 2, None, None)
    assert [row["reward"] for row in client.get("/api/rollouts/0").json()] == [1.0, 0.0]


def test_a_run_folder_of_prime_rl_has_its_rollouts(tmp_path: Path, capsys: Any) -> None:
    step = tmp_path / "run" / "rollouts" / "step_2" / "train"
    failed = trace("c", ok=False, errors=[{"type": "Timeout", "message": "too late"}])
    lines(step / "all" / "traces.jsonl", trace("a", info={}), trace("b", info={}), failed)
    lines(step / "effective" / "traces.jsonl", trace("b"))
    saved = RunFolder.around(tmp_path / "run").rollouts()
    assert [(row["rollout"], row["outcome"], row["advantage"]) for row in saved.rows(2)] == [
        ("b", "sent", 0.5),
        ("a", "unused", None),
        ("c", "failed_rollout", 0.5),
    ]
    assert saved.counts() == {"2": {"sent": 1, "unused": 1, "failed_rollout": 1}}
    assert saved.rows(2)[2]["error"] == "too late" and "traces.jsonl" in saved.lacks()
    view(tmp_path / "run", terminal=True)
    assert "prime-rl's traces have texts and rewards" in " ".join(capsys.readouterr().out.split())


def test_an_export_that_ended_early_says_what_it_lacks(made_run: Any, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made_run.folder, folder)
    lost = [{"step": step, "export/lost_sequences": number} for step, number in enumerate((0, 0, 5, 8))]
    lines(folder / "metrics" / "trainer.jsonl", *lost)
    run = ServedRun(Exports(folder))
    said = "The token export lacks 13 sequences of steps 2 to 3: its files reached trainer.experimental.token"
    assert json.loads(run.run())["notes"][0].startswith(said)
    view(folder, terminal=True)
    assert said in " ".join(capsys.readouterr().out.split())
    assert not any("lacks" in note for note in json.loads(ServedRun(Exports(made_run.folder)).run())["notes"])


def test_a_summary_is_made_once(made_run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """In a cache, not beside the export; until a file changes."""
    folder = tmp_path / "run"
    shutil.copytree(made_run.folder, folder)
    before = sorted(folder.rglob("*"))
    first = ServedRun(Exports(folder))
    first.summarise_once()
    decoded = []
    monkeypatch.setattr("pellucid.viewer.source.encode_step", lambda step, *_, **__: decoded.append(step))
    second = ServedRun(Exports(folder))
    second.summarise_once()
    assert decoded == [] and sorted(folder.rglob("*")) == before
    assert json.loads(second.run())["steps"] == json.loads(first.run())["steps"]
    made = Exports(folder).known_summary(1)
    assert made is not None and made.as_dict() == pellucid.export.open(folder).summary(1).as_dict()
    path = folder / "token_exports" / "step_1" / "rank_0.jsonl"
    path.write_text(path.read_text().replace('"reward": 1.0,', '"reward": 0.5,'))
    assert Exports(folder).known_summary(1) is None and Exports(folder).known_summary(2) is not None
    for cached in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json"):
        cached.write_text("{")
    assert Exports(folder).known_summary(2) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file: nothing can be kept
    assert (
        Exports(folder).known_summary(0) is None and Exports(folder).summary(0).total().counts["tokens"] > 0
    )
