"""Several runs: what a list says of each, which settings differ, and what lays them over each other."""

import base64
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pellucid.config.tools import ViewSettings
from pellucid.errors import ConfigError, DataError
from pellucid.viewer import page as page_module
from pellucid.viewer import run_view
from pellucid.viewer.access import Exports
from pellucid.viewer.digest import NUM_PLACES, DigestReader, Setting, read_metric_lines
from pellucid.viewer.runs import LOOK_AGAIN_S, RunList, differing, find_runs, value_text
from pellucid.viewer.server import make_list_app
from pellucid.viewer.source import ServedRun
from pellucid.viewer.summary import as_json

HOSTILE = "<img src=x onerror=alert(1)>"
CONFIG = """max_steps = {max_steps}
output_dir = "somewhere/{lr}"
[trainer.optim]
lr = {lr}
[trainer.loss]
type = "{loss}"
[orchestrator.sampling]
temperature = 1.0
[[orchestrator.env]]
id = "math"
"""


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    rewards: Sequence[float],
    *,
    lr: float = 0.0003,
    loss: str = "dppo",
    max_steps: int | None = None,
    step_s: float = 10.0,
    tokens: int = 100,
    outcome: str | None = "finished",
) -> Path:
    """A run as `pellucid rl` leaves it: a step takes `step_s` and trains `tokens`."""
    configs = folder / "configs"
    (configs / "step_0").mkdir(parents=True)
    text = CONFIG.format(max_steps=len(rewards) if max_steps is None else max_steps, lr=lr, loss=loss)
    for path in (configs / "rl.toml", configs / "step_0" / "trainer.toml"):
        path.write_text(text)
    trained = [
        {
            "step": step,
            "time": 1000 + step_s * (step + 1),
            "time/step_s": step_s,
            "loss": -step / 10,
            "grad_norm": 1.0 + step,
            "total/trained_tokens": tokens * (step + 1),
        }
        for step in range(len(rewards))
    ]
    write_lines(folder / "metrics" / "trainer.jsonl", trained)
    sampled = [{"step": step, "reward/all": reward} for step, reward in enumerate(rewards)]
    write_lines(folder / "metrics" / "orchestrator.jsonl", sampled)
    (folder / "logs").mkdir()
    if outcome is not None:
        (folder / "logs" / "OUTCOME").write_text(outcome)
    return folder


def age(folder: Path, at: float) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (at, at), follow_symlinks=False)


@pytest.fixture
def three(tmp_path: Path, rollout: Any, save_rollouts: Any) -> Path:
    """A baseline, a higher learning rate, another loss; two of them tried the same examples."""
    folder = tmp_path / "sweep"
    write_run(folder / "baseline", [0.1, 0.2, 0.5])
    write_run(folder / "fast", [0.1, 0.4, 0.8, 0.9], lr=0.001, step_s=5, tokens=50)
    write_run(folder / "other" / "icepop", [0.1], loss="icepop", max_steps=3, outcome="interrupted")
    save_rollouts(
        folder / "baseline",
        0,
        rollout(0, "sent", reward=0.0),
        rollout(1, "sent", reward=0.5, example_id="e1"),
    )
    save_rollouts(folder / "baseline", 2, rollout(2, "sent", reward=1.0), rollout(3, "sent", reward=0.5))
    save_rollouts(folder / "fast", 1, rollout(4, "sent", reward=0.25, example_id="e0"))
    save_rollouts(folder / "fast", 3, rollout(5, "sent", reward=None, example_id="e0", env_name="code"))
    for number, name in enumerate(("other/icepop", "fast", "baseline")):
        age(folder / name, 5000 + number)
    return folder


def view(*paths: Path, **options: Any) -> None:
    run_view(ViewSettings(path=paths[0], others=paths[1:], **options))


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in RunList([folder]).head(live=True)["runs"]}


def test_a_row_says_how_a_run_went(three: Path) -> None:
    rows = rows_of(three)
    assert list(rows) == ["baseline", "fast", "other/icepop"]  # those that changed last first
    baseline, fast = rows["baseline"], rows["fast"]
    assert (baseline["state"], baseline["steps"], baseline["max_steps"]) == ("finished", 3, 3)
    assert baseline["curve"] == [[0, 0.1], [1, 0.2], [2, 0.5]]
    assert (baseline["loss"], baseline["tokens"], baseline["duration_s"]) == (-0.2, 300, 30.0)
    assert (fast["loss"], fast["tokens"], fast["duration_s"]) == (-0.3, 200, 20.0)
    assert fast["settings"] == {"max_steps": "4", "trainer.loss.type": "dppo", "trainer.optim.lr": "0.001"}
    interrupted = rows["other/icepop"]
    assert (interrupted["state"], interrupted["steps"], interrupted["max_steps"]) == ("interrupted", 1, 3)


@pytest.mark.parametrize(
    ("outcome", "log", "is_old", "max_steps", "state", "reason"),
    [
        ("finished", "", False, 9, "finished", ""),
        ("failed\nthe disk is full", "", True, 9, "failed", "the disk is full"),
        ("interrupted", "error: late", True, 9, "interrupted", ""),
        ("", "", False, 9, "running", ""),
        ("", "", True, 9, "interrupted", ""),
        (None, "", True, 2, "finished", ""),
        (None, "12:00 INFO x\nerror: no room\n", True, 9, "failed", "no room"),
        (
            None,
            "Traceback (most recent call last):\n  …\nKeyError: 'x'\n",
            True,
            9,
            "failed",
            "KeyError: 'x'",
        ),
        (None, "ValueError: of an environment\n12:00 INFO x\n", True, 9, "interrupted", ""),
        (None, "error: no room\n", False, 9, "running", ""),
    ],
)
def test_the_state_follows_from_what_was_written_last(
    tmp_path: Path, outcome: str | None, log: str, is_old: bool, max_steps: int, state: str, reason: str
) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2], max_steps=max_steps, outcome=outcome)
    (run / "logs" / "trainer.log").write_text(log)
    if is_old:
        age(run, 5000)
    digest = DigestReader().digest(run, time.time())
    assert (digest.state, digest.reason) == (state, reason)


def test_a_resume_changes_settings_and_its_pause_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4])
    lines = read_metric_lines(run / "metrics" / "trainer.jsonl")
    later = [{**line, "time": line["time"] + 3600 * (line["step"] >= 2)} for line in lines]
    write_lines(run / "metrics" / "trainer.jsonl", later)
    assert DigestReader().digest(run, 0).duration_s == 3640
    resumed = run / "configs" / "step_2" / "trainer.toml"
    resumed.parent.mkdir()
    resumed.write_text(CONFIG.format(max_steps=4, lr=0.0001, loss="dppo"))
    digest = DigestReader().digest(run, 0)
    assert digest.duration_s == 40
    assert digest.settings["trainer.optim.lr"] == [Setting(0, "0.0003"), Setting(2, "0.0001")]
    assert value_text(digest.settings["trainer.optim.lr"]) == "0.0003 → 0.0001 from step 2"
    assert RunList([run]).curves(0)["time"] == [[0, 10], [1, 20], [2, 30], [3, 40]]


def test_of_a_long_run_only_some_places_are_read_and_both_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step / 5000 for step in range(5000)])
    path = run / "metrics" / "orchestrator.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5000, "reward/all": 7')  # it is being written
    digest = DigestReader().digest(run, 0)
    steps = [step for step, _ in digest.curve]
    assert steps[0] == 0 and steps[-1] == 4999 and len(steps) <= NUM_PLACES + 1
    assert steps == sorted(set(steps)) and all(value == step / 5000 for step, value in digest.curve)
    gaps = [right - left for left, right in pairwise(steps)]
    assert max(gaps) < 2 * 5000 / NUM_PLACES
    assert (digest.num_steps, digest.num_tokens, digest.duration_s) == (5000, 500_000, 50_000)


def test_a_file_is_read_again_only_once_it_has_changed(tmp_path: Path) -> None:
    run, reader = write_run(tmp_path / "run", [0.1, 0.2]), DigestReader()
    path = run / "metrics" / "orchestrator.jsonl"
    before = path.stat()
    assert reader.digest(run, 0).curve == [[0, 0.1], [1, 0.2]]
    path.write_text(path.read_text().replace("0.2", "0.3"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time are the same
    assert reader.digest(run, 0).curve == [[0, 0.1], [1, 0.2]]
    os.utime(path, (6000, 6000))
    assert reader.digest(run, 0).curve == [[0, 0.1], [1, 0.3]]


def test_damaged_runs_and_links_are_rows_without_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "odd", [0.1])
    (run / "metrics" / "trainer.jsonl").write_text(
        'no json\n[1]\n{"step": "x"}\n{"step": 3, "loss": "high"}\n'
    )
    (run / "metrics" / "orchestrator.jsonl").unlink()
    (run / "metrics" / "orchestrator.jsonl").symlink_to(write_run(tmp_path / "away", [0.9]) / "metrics" / "x")
    (run / "configs" / "rl.toml").write_text("= broken")
    os.mkfifo(run / "logs" / "trainer.log")
    digest = DigestReader().digest(run, 0)
    assert (digest.num_steps, digest.loss, digest.curve, digest.duration_s) == (4, None, [], None)
    assert digest.settings == {}
    (run / "configs" / "rl.toml").unlink()
    (run / "configs" / "rl.toml").symlink_to(tmp_path / "away" / "configs" / "rl.toml")
    assert DigestReader().digest(run, 0).settings == {}
    linked = tmp_path / "runs" / "linked"
    (linked / "ledger").mkdir(parents=True)
    for part in ("metrics", "configs"):
        (linked / part).symlink_to(tmp_path / "away" / part)
    digest = DigestReader().digest(linked, 0)
    assert (digest.num_steps, digest.curve, digest.settings) == (0, [], {})


def test_a_missing_setting_counts_only_beside_runs_of_the_same_kind(three: Path) -> None:
    sft = three / "warmup" / "configs"
    sft.mkdir(parents=True)
    (sft / "sft.toml").write_text('max_steps = 3\n[trainer.optim]\nlr = 0.0003\n[data]\npath = "x"\n')
    runs = RunList([three]).runs()
    by_name = {run.name: run for run in runs}
    assert differing(runs) == ["max_steps", "trainer.optim.lr", "trainer.loss.type"]
    assert differing([by_name["baseline"], by_name["warmup"]]) == []
    assert differing([by_name["baseline"], by_name["other/icepop"]]) == ["trainer.loss.type"]
    more = three / "fast" / "configs" / "rl.toml"
    more.write_text(more.read_text() + "weight = 2.0\n")  # of the environment
    both = [run for run in RunList([three]).runs() if run.name in ("baseline", "fast")]
    assert "orchestrator.env[0].weight" in differing(both)


def test_curves_lie_on_steps_time_and_tokens(three: Path) -> None:
    runs = RunList([three / "fast", three / "baseline"])
    fast = runs.curves(0)
    assert fast["metrics"]["reward/all"] == [[0, 0.1], [1, 0.4], [2, 0.8], [3, 0.9]]
    assert fast["time"] == [[0, 5], [1, 10], [2, 15], [3, 20]]
    assert fast["tokens"] == [[0, 50], [1, 100], [2, 150], [3, 200]]
    write_lines(
        three / "fast" / "metrics" / "trainer.jsonl",
        [{"step": 4, "loss_tokens": 7}, {"step": 5, "loss_tokens": 5}],
    )
    assert runs.curves(0)["tokens"] == [[4, 7], [5, 12]]


def test_examples_are_found_by_environment_and_id(three: Path) -> None:
    runs = RunList([three / "baseline", three / "fast"])
    assert runs.examples(0) == [["math", "e0", [[0, 1, 0.0], [2, 2, 0.75]]], ["math", "e1", [[0, 1, 0.5]]]]
    assert runs.examples(1) == [["math", "e0", [[1, 1, 0.25]]], ["code", "e0", [[3, 1, None]]]]
    assert [row["messages"][-1] for row in runs.attempts(0, 2)] == [
        {"role": "assistant", "text": "is 2"},
        {"role": "assistant", "text": "is 3"},
    ]


def test_without_saved_rollouts_the_records_of_the_export_are_the_attempts(made_run: Any) -> None:
    runs = RunList([made_run.folder])
    index = {(env, example): places for env, example, places in runs.examples(0)}
    assert index["math", "e0"] == [[0, 4, 0.5], [1, 4, 0.5], [2, 4, 0.5]]
    assert index["tools", "e1-3"] == [[1, 4, 0.5]]
    row = runs.attempts(0, 2)[1]
    assert (row["env"], row["example"], row["reward"]) == ("math", "e0", 0.25)
    assert row["messages"] == [
        {"role": "user", "text": "<|im_start|>user\n2 + 0 = ?<|im_end|>\n"},
        {"role": "assistant", "text": "<|im_start|>assistant\nthe answer is 5, step 2<|im_end|>"},
    ]
    assert runs.attempts(0, 77) == []


def test_what_cannot_be_compared_is_named(three: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(DataError, match=r"notes is no run folder and holds none: .*, only a\.txt; give"):
        view(three / "baseline", tmp_path / "notes", terminal=True)
    with pytest.raises(DataError, match=r"gone is no folder; of several paths, each is a run folder"):
        view(three / "baseline", tmp_path / "gone", terminal=True)
    with pytest.raises(ConfigError, match=r"baseline is given twice; .* name each once"):
        view(three / "baseline", three / "other" / ".." / "baseline" / "metrics", terminal=True)
    with pytest.raises(ConfigError, match="--step, --rank, .* are of one run; name it: "):
        view(three, step=1)


def test_a_data_set_beside_runs_is_no_export(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (three / "warmup.jsonl").write_text('{"messages": []}\n')
    view(three, terminal=True)
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("baseline", "fast", "settings that differ"))


def test_packages_of_code_are_no_runs(three: Path) -> None:
    """`src/pellucid` and `tests` have folders named `metrics`, `ledger` and `rollouts`, too."""
    (three / "src" / "metrics").mkdir(parents=True)
    (three / "src" / "metrics" / "__init__.py").touch()
    (three / "begun" / "metrics").mkdir(parents=True)
    names = [path.name for path in find_runs(three)]
    assert sorted(names) == ["baseline", "begun", "fast", "icepop"]


def test_a_narrow_terminal_shows_what_matters_most(three: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    view(three / "baseline", three / "fast", terminal=True)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    first = next(line for line in lines if line.startswith("baseline"))
    assert re.fullmatch(r"baseline +finished +3 +0\.1 → 0\.5 +300 +30 s", first)


def test_the_terminal_has_a_table_and_the_settings_that_differ(
    three: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    view(three / "baseline", three / "fast", terminal=True)
    shown = capsys.readouterr().out
    first = next(line for line in shown.splitlines() if line.startswith("baseline"))
    assert re.search(r"finished +3 +0\.1 → 0\.5 +▁\S*█ +-0\.2 +300 +30 s +no export", first)
    assert re.search(r"trainer\.optim\.lr +0\.0003 +0\.001", shown)
    assert "trainer.loss.type" not in shown


def client_of(runs: RunList) -> TestClient:
    app = make_list_app(runs, lambda run: ServedRun(Exports(run), home="../"))
    return TestClient(app, base_url="http://127.0.0.1:7357")


def test_the_server_lists_runs_opens_each_and_finds_new_ones(three: Path, monkeypatch: Any) -> None:
    write_run(three / HOSTILE.replace("/", ""), [0.5])
    runs = RunList([three])
    client = client_of(runs)
    assert HOSTILE not in client.get("/").text
    head = client.get("/api/run").json()
    numbers = {row["name"]: row["number"] for row in head["runs"]}
    assert set(numbers) == {"baseline", "fast", "other/icepop", HOSTILE}
    for name, number in numbers.items():
        opened = client.get(f"/{number}/api/run").json()
        assert (opened["name"], opened["home"]) == (name.rpartition("/")[2], "../")
        assert 'id="run" data-served' in client.get(f"/{number}/").text
        assert client.get(f"/{number}/api/step/77").status_code == 404
    assert client.get(f"/api/curves/{numbers['fast']}").json()["tokens"][-1] == [3, 200]
    assert client.get(f"/api/examples/{numbers['baseline']}").json()[1] == ["math", "e1", [[0, 1, 0.5]]]
    assert client.get(f"/api/attempts/{numbers['fast']}/1").json()[0]["rollout"] == "r4"
    for path in ("/9/api/run", "/api/curves/9", "/api/attempts/9/0", "/-1/"):
        assert client.get(path).status_code == 404
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    state = client.get("/api/pulse").json()["state"]
    assert state == head["state"] == client.get("/api/pulse").json()["state"]
    write_run(three / "new", [0.5])
    monkeypatch.setattr(runs, "_looked_at", -LOOK_AGAIN_S)
    assert client.get("/api/pulse").json()["state"] != state
    names = {row["name"]: row["number"] for row in client.get("/api/run").json()["runs"]}
    assert names["new"] == 4 and all(names[name] == number for name, number in numbers.items())


def blocks_of(page: Path) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', page.read_text())
    return {name: json.loads(zlib.decompress(base64.b64decode(data))) for name, data in found}


def test_a_page_holds_curves_settings_and_shared_examples(three: Path, caplog: Any, monkeypatch: Any) -> None:
    output = three.parent / "page.html"
    with caplog.at_level(logging.INFO):
        view(three / "baseline", three / "fast", output=output)
    assert "2 runs, 1 shared examples" in caplog.text
    blocks = blocks_of(output)
    assert [run["name"] for run in blocks["run"]["runs"]] == ["baseline", "fast"]
    assert (blocks["run"]["live"], blocks["run"]["notes"]) == (False, [])
    assert blocks["curves/1"]["tokens"][-1] == [3, 200]
    assert blocks["examples/0"] == [["math", "e0", [[0, 1, 0.0], [2, 2, 0.75]]]]
    assert [row["rollout"] for row in blocks["attempts/0/2"]] == ["r2", "r3"]
    assert [row["rollout"] for row in blocks["attempts/0/0"]] == ["r0"]  # e1 is not shared
    monkeypatch.setattr(page_module, "CURVE_BYTES", 10)
    view(three, output=output)
    head = blocks_of(output)["run"]
    assert len(head["with_curves"]) == 1
    assert head["notes"][:1] == [
        "This page has the curves of the 1 newest of 3 runs; name fewer, or serve them: `pellucid view` "
        "without `-o`."
    ]


def test_examples_of_a_page_are_as_many_as_fit(
    tmp_path: Path, rollout: Any, save_rollouts: Any, monkeypatch: Any
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, [0.1])
        texts = [{"text": "x" * 1000, "num_tokens": 1}]
        many = [rollout(n, "sent", example_id=f"e{n}", trajectory=texts) for n in range(9)]
        save_rollouts(tmp_path / "runs" / name, 0, *many)
    output = tmp_path / "page.html"
    size = len(as_json(RunList([tmp_path / "runs"]).attempts(0, 0)[0]))
    monkeypatch.setattr(page_module, "ROLLOUT_BYTES", 5 * size)  # two runs' attempts at two examples
    assert page_module.write_runs_page(RunList([tmp_path / "runs"]), output).startswith("2 runs, 2 shared")
    blocks = blocks_of(output)
    assert [example for _, example, _ in blocks["examples/0"]] == ["e0", "e1"]
    assert [row["example"] for row in blocks["attempts/1/0"]] == ["e0", "e1"]
    assert blocks["run"]["notes"] == [
        "This page has the texts of 2 of 9 examples that several of the 2 newest runs tried; `pellucid view` "
        "without `-o` serves all."
    ]


@pytest.fixture
def shown(three: Path, visit: Any) -> Any:
    """The page of all three runs, open."""
    view(three, output=three.parent / "page.html")
    return visit((three.parent / "page.html").as_uri(), ".runs-view tr[data-row]")


def names_in(page: Any) -> list[str]:
    return page.locator(".runs-view tr[data-row] .run-name b").all_inner_texts()


def test_the_list_sorts_filters_and_selects_by_keyboard(shown: Any) -> None:
    page = shown
    assert names_in(page) == ["baseline", "fast", "other/icepop"]
    first = page.locator("tr[data-row]").first.inner_text().split()
    assert first[:5] == ["baseline", "✓finished", "0.1", "→", "0.5"]
    assert first[5:] == ["3", "−0.2", "300", "30", "s", "3", "dppo", "0.0003"]
    page.locator("th button", has_text="reward").click()
    assert names_in(page) == ["fast", "baseline", "other/icepop"]
    page.locator("th button", has_text="optim.lr").click()
    page.wait_for_selector('th[aria-sort="ascending"]')
    assert names_in(page)[-1] == "fast"
    for text, expected in (
        ("lr=1e-3", ["fast"]),
        ("temperature=1", ["baseline", "fast", "other/icepop"]),
        ("loss.type=icepop", ["other/icepop"]),
        ("state=finished lr=0.0003", ["baseline"]),
        ("interrupt", ["other/icepop"]),
        ("r=0.001", []),
    ):
        page.locator("[aria-label='Find runs']").fill(text)
        assert sorted(names_in(page)) == expected, text
    page.get_by_role("button", name="all runs").click()
    page.locator('tr[data-row][tabindex="0"]').focus()
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert page.locator(".runs-view input:checked").count() == 2
    assert "2 runs selected" in page.locator("#spoken").inner_text()
    page.get_by_role("button", name="compare 2 runs").click()
    page.wait_for_selector(".compare-view .strip canvas")
    page.go_back()
    page.wait_for_selector(".runs-view tr[data-row]")
    assert page.locator(".runs-view input:checked").count() == 2
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Find runs"


STRIPS = """() => ({ x: $main.app.view.steps, strips: $main.app.view.drawn.map(({ title, lines }) =>
  [title, lines.map(({ label, values, colour, dash }) => [label, values, colour, dash])]) })"""


def go(page: Any, changes: dict[str, Any]) -> None:
    page.evaluate(
        "async (changes) => { $main.app.go(changes); await $main.app.update(new Set(['over'])); }", changes
    )


def test_curves_of_both_runs_lie_on_one_axis(shown: Any) -> None:
    page = shown
    go(page, {"view": "compare", "runs": "baseline//fast"})
    page.wait_for_selector(".compare-view .strip canvas")
    found = page.evaluate(STRIPS)
    strips = dict(found["strips"])
    assert found["x"] == [0, 1, 2, 3]
    assert strips["Reward"] == [
        ["baseline", [0.1, 0.2, 0.5, None], "run-1", []],
        ["fast", [0.1, 0.4, 0.8, 0.9], "run-2", [7, 3]],
    ]
    go(page, {"over": "time"})
    found = page.evaluate(STRIPS)
    assert found["x"] == [5000, 10000, 15000, 20000, 30000]  # milliseconds
    assert dict(found["strips"])["Gradient norm"][0][1] == [None, 1, None, 2, 3]
    assert dict(found["strips"])["Gradient norm"][1][1] == [1, 2, 3, 4, None]
    go(page, {"over": "tokens", "pick": "loss"})
    found = page.evaluate(STRIPS)
    assert found["x"] == [50, 100, 150, 200, 300]
    assert [title for title, _ in found["strips"]] == ["loss"]
    assert found["strips"][0][1][1][1] == [0, -0.1, -0.2, -0.3, None]
    page.locator(".strip-chart").first.focus()
    page.keyboard.press("End")
    assert (
        page.locator(".strip-value").first.inner_text().replace("\n", " ")
        == "baseline −0.2 fast – 300 tokens"
    )
    assert [column["name"] for column in page.evaluate("() => $main.app.view.columns()")] == [
        "tokens trained",
        "baseline/loss",
        "fast/loss",
    ]


def test_the_settings_that_differ_are_those_of_the_command_line(shown: Any, three: Path) -> None:
    page = shown
    runs = RunList([three]).runs()
    for chosen in (["baseline", "fast"], ["baseline", "other/icepop"], ["baseline", "fast", "other/icepop"]):
        go(page, {"view": "compare", "runs": "//".join(chosen)})
        page.wait_for_function(
            "(n) => document.querySelectorAll('.legend-run').length === n", arg=len(chosen)
        )
        keys = page.locator(".settings-table tbody th").all_inner_texts()
        assert keys == differing([run for run in runs if run.name in chosen])
    assert page.locator(".settings-table tbody tr", has_text="trainer.loss.type").locator(
        "td"
    ).all_inner_texts() == [
        "dppo",
        "dppo",
        "icepop",
    ]


def test_the_same_example_stands_side_by_side(shown: Any) -> None:
    page = shown
    go(page, {"view": "compare", "runs": "baseline//fast"})
    page.wait_for_selector(".sides .member")
    assert page.locator(".example-list tr[data-row]").count() == 1
    assert "step 2 · reward 1 · mean 0.75 of 2 attempts" in page.locator(".member").nth(0).inner_text()
    beside = page.locator(".member").nth(1)
    assert "step 1, the nearest to 2 · reward 0.25 (−0.750)" in beside.inner_text()
    assert beside.locator(".message pre").all_inner_texts() == ["2 + 24", "is 24"]  # 2 is crossed out
    assert beside.locator("del").all_inner_texts() == ["2", "2"]
    assert beside.locator("ins").all_inner_texts() == ["4", "4"]
    page.get_by_label("attempt").select_option("1")
    page.wait_for_function("() => document.querySelector('.member').innerText.includes('reward 0.5')")
    page.get_by_label("attempt").focus()
    page.keyboard.press("ArrowUp")
    page.wait_for_function("() => document.querySelector('.member').innerText.includes('reward 1')")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "attempt"
    page.get_by_label("step of baseline").select_option("0")
    page.wait_for_function("() => document.querySelector('.member').innerText.includes('step 0')")


def test_too_few_runs_and_nothing_in_common_say_what_to_do(shown: Any) -> None:
    page = shown
    go(page, {"view": "compare", "runs": "fast"})
    assert "Only fast is selected." in page.locator(".compare-view .notice").inner_text()
    go(page, {"runs": "fast//other/icepop"})
    page.wait_for_selector(".examples .notice")
    assert "other/icepop has no saved rollouts." in page.locator(".examples .notice").inner_text()
    assert page.locator(".examples .notice button").count() == 1
    page.locator(".examples .notice button").click()
    page.wait_for_selector(".runs-view tr[data-row]")


def test_a_click_opens_a_run_and_its_page_leads_back_to_the_list(
    three: Path, served: Any, visit: Any
) -> None:
    page = visit(f"{served(three)}#runs?sort=name&up=1&runs=fast", ".runs-view tr[data-row]")
    page.get_by_role("link", name="baseline").click()
    page.wait_for_selector(".run-view .strip canvas")
    assert page.locator("#name").inner_text() == "baseline"
    page.locator("a#brand").click()
    page.wait_for_selector(".runs-view input:checked")
    assert page.locator(".run-name a").all_inner_texts() == ["baseline", "fast", "other/icepop"]
    page.locator("tr[data-row]").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".run-view .strip canvas")
    assert page.locator("#name").inner_text() == "fast"


def test_a_list_follows_its_runs(three: Path, served: Any, visit: Any) -> None:
    page = visit(served(three), ".runs-view tr[data-row]")
    assert page.locator(".live").is_hidden()
    write_run(three / "new", [0.5], max_steps=9, outcome="")
    page.wait_for_selector(".run-name a >> text=new")
    assert page.locator(".live").is_visible()
    assert page.locator("tr[data-row]", has_text="new").locator(".run-running").count() == 1


def test_names_and_values_are_text_and_nothing_else(
    tmp_path: Path, visit: Any, rollout: Any, save_rollouts: Any
) -> None:
    for name, loss in ((HOSTILE.replace("/", ""), "</script><b>x"), ("b", "plain")):
        write_run(tmp_path / "runs" / name, [0.1, 0.2], loss=loss)
        save_rollouts(tmp_path / "runs" / name, 0, rollout(0, "sent", example_id=HOSTILE, env_name=HOSTILE))
    view(tmp_path / "runs", output=tmp_path / "page.html")
    page = visit((tmp_path / "page.html").as_uri(), ".runs-view tr[data-row]")
    assert HOSTILE in names_in(page)
    go(page, {"view": "compare", "runs": f"{HOSTILE}//b"})
    page.wait_for_selector(".sides .member")
    assert "</script><b>x" in page.locator(".settings-table").inner_text()
    assert page.locator("img").count() == 0 and page.locator(".settings-table b").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)])
def test_nothing_serious_in_list_and_comparison(browser: Any, three: Path, theme: str, width: int) -> None:
    view(three, output=three.parent / "page.html")
    context = browser.new_context(
        viewport={"width": width, "height": 850}, color_scheme=theme, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto((three.parent / "page.html").as_uri())
    page.wait_for_selector(".runs-view tr[data-row]")
    page.evaluate((Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8"))
    for name, ready in (("runs", "tr[data-row]"), ("compare", ".sides .member")):
        go(page, {"view": name, "runs": "baseline//fast"})
        page.wait_for_selector(ready)
        result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        found = [
            (each["id"], [node["target"] for node in each["nodes"]][:3])
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert found == [], f"{name}: {found}"
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
    context.close()
