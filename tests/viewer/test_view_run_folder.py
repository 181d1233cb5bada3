"""What a page takes from the run folder beside the exports."""

import json
from pathlib import Path
from typing import Any

import pytest

from pellucid.ledger import Flow, Journal, Stage, State
from pellucid.viewer.run_folder import RunFolder


def write_ledger(run: Path, *, trained: int) -> None:
    counts = {
        Stage.INFERENCE: {Flow.SAMPLED: 100, Flow.DELIVERED: 90, State.CANCELLED: 10},
        Stage.ORCHESTRATOR: {Flow.RECEIVED: 90, State.STALE: 20, Flow.SENT: 70},
        Stage.TRAINER: {
            Flow.RECEIVED: 70,
            State.TRAINED: trained,
            State.MASKED: 5,
            Flow.COMPUTED: trained + 5,
        },
    }
    for stage, entries in counts.items():
        journal = Journal(run / "ledger" / f"{stage.value}.jsonl", stage)
        for what, tokens in entries.items():
            journal.count("demo", "math", what, tokens)
        journal.close(0)


def test_the_run_is_found_from_any_part_of_it(write_run: Any, tmp_path: Path) -> None:
    run = write_run()
    step = run / "token_exports" / "step_0"
    for path in (run, run / "token_exports", step, step / "rank_0.jsonl"):
        assert RunFolder.around(path).folder == run
    assert RunFolder.around(tmp_path / "rank_0.jsonl").folder is None


def test_the_curve_takes_the_last_word_on_a_step(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    rows = [{"step": 0, "reward/all": 0.5}, {"step": 1, "reward/all": 0.6}, {"step": 1, "reward/all": 0.7}]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2, "reward/all": None}, {"step": 3}])
    (tmp_path / "metrics" / "orchestrator.jsonl").write_text(text)
    assert RunFolder(tmp_path).reward_curve() == {"steps": [0, 1], "values": [0.5, 0.7]}


def test_the_ledger_is_summed_up_in_the_order_of_its_states(tmp_path: Path) -> None:
    write_ledger(tmp_path, trained=65)
    assert RunFolder(tmp_path).ledger() == {
        "sampled": 100,
        "states": [["cancelled", 10], ["stale", 20], ["masked", 5], ["trained", 65]],
        "differences": [],
        "running": [],
    }


def test_a_ledger_that_does_not_balance_says_where(tmp_path: Path) -> None:
    write_ledger(tmp_path, trained=64)
    ledger = RunFolder(tmp_path).ledger()
    assert ledger is not None
    assert ledger["differences"] == ["trainer, step 0: 1 token missing (run 'demo', environment 'math')"]


def test_a_ledger_that_cannot_be_read_is_said_and_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "trainer.jsonl").write_text("nonsense\n")
    ledger = RunFolder(tmp_path).ledger()
    assert ledger is not None and "trainer.jsonl:1 is not a ledger entry" in ledger["error"]


@pytest.mark.parametrize("folder", [None, Path("/nonexistent")])
def test_without_them_there_is_nothing(folder: Path | None) -> None:
    run = RunFolder(folder)
    assert (run.reward_curve(), run.ledger(), run.model_folder()) == (None, None, None)
