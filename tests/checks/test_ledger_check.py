"""`pellucid ledger`: the table, the verdict and the exit code."""

import json
from pathlib import Path

import pytest

from pellucid.checks.ledger import run_ledger
from pellucid.config.tools import LedgerSettings
from pellucid.errors import LedgerError


def journal(run: Path, stage: str, counts: dict[str, dict[str, int]], *, closed: bool = True) -> None:
    """Writes the journal of `stage`: counts per environment, and whether the process ended in good order."""
    lines = [{"stage": stage, "run": "demo", "env": env, "counts": counts[env]} for env in counts]
    if closed:
        lines.append({"stage": stage, "closed": True})
    path = run / "ledger" / f"{stage}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(run: Path, *, trained: int = 600, closed: bool = True) -> Path:
    """Two environments: 1,000 sampled tokens of `reverse`, 200 of `sort`."""
    journal(
        run,
        "inference",
        {"reverse": {"sampled": 1000, "delivered": 1000}, "sort": {"sampled": 200, "cancelled": 200}},
    )
    journal(run, "orchestrator", {"reverse": {"received": 1000, "zero_advantage": 300, "sent": 700}})
    trainer = {"received": 700, "masked": 100, "trained": trained, "context": 250, "padding": 50}
    journal(
        run,
        "trainer",
        {"reverse": {**trainer, "computed": trained + 400}},
        closed=closed,
    )
    return run


def cells(output: str) -> dict[str, list[str]]:
    """Rows of the printed table by their label."""
    rows = [line.split() for line in output.splitlines()]
    return {label: rest for label, *rest in filter(None, rows) if rest and rest[0][0].isdigit()}


def test_a_run_that_balances(tmp_path, capsys):
    assert run_ledger(LedgerSettings(run=write_run(tmp_path))) == 0

    output = capsys.readouterr().out
    assert cells(output) == {
        "cancelled": ["0", "0.0%", "200", "100.0%", "200", "16.7%"],
        "zero_advantage": ["300", "30.0%", "0", "0.0%", "300", "25.0%"],
        "masked": ["100", "10.0%", "0", "0.0%", "100", "8.3%"],
        "trained": ["600", "60.0%", "0", "0.0%", "600", "50.0%"],
        "sampled": ["1,000", "200", "1,200"],
        "context": ["250", "0", "250"],
        "padding": ["50", "0", "50"],
        "computed": ["1,000", "0", "1,000"],
        "saved": ["0", "0", "0"],
    }
    assert output.endswith("balanced: every one of the 1,200 sampled tokens is accounted for\n")
    assert max(map(len, output.splitlines())) <= 100


def test_one_missing_token_is_named_and_fails(tmp_path, capsys):
    assert run_ledger(LedgerSettings(run=write_run(tmp_path, trained=599))) == 1

    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "trainer, step 0: 1 token missing (run 'demo', environment 'reverse')"
    assert "balanced" not in output


def test_a_run_that_goes_on_has_tokens_in_flight(tmp_path, capsys):
    assert run_ledger(LedgerSettings(run=write_run(tmp_path, trained=599, closed=False))) == 0

    output = capsys.readouterr().out
    assert cells(output)["in_flight"] == ["1", "0.1%", "0", "0.0%", "1", "0.1%"]
    assert output.splitlines()[-2:] == [
        "balanced: every one of the 1,200 sampled tokens is accounted for",
        "not closed: trainer (still running, stopped or killed; a resume goes on with them)",
    ]


def test_json_has_the_same_numbers(tmp_path, capsys):
    assert run_ledger(LedgerSettings(run=write_run(tmp_path, trained=599), json=True)) == 1

    beside = {"context": 250, "padding": 50, "computed": 999}
    reverse = {"zero_advantage": 300, "masked": 100, "trained": 599}
    assert json.loads(capsys.readouterr().out) == {
        "balanced": False,
        "running": [],
        "all": {"sampled": 1200, "states": {"cancelled": 200, **reverse}, "beside": beside},
        "accounts": [
            {"run": "demo", "env": "reverse", "sampled": 1000, "states": reverse, "beside": beside},
            {"run": "demo", "env": "sort", "sampled": 200, "states": {"cancelled": 200}, "beside": {}},
        ],
        "differences": [{"run": "demo", "env": "reverse", "where": "trainer, step 0", "tokens": 1}],
    }


def test_many_environments_still_fit(tmp_path, capsys):
    environments = {f"environment-{number}": {"sampled": 10**9, "cancelled": 10**9} for number in range(9)}
    journal(tmp_path, "inference", environments)
    journal(tmp_path, "orchestrator", {})
    journal(tmp_path, "trainer", {})

    assert run_ledger(LedgerSettings(run=tmp_path)) == 0

    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    assert "…" not in output
    assert all(name in output for name in environments)
    assert "9,000,000,000" in output


def test_a_folder_without_a_ledger_is_an_error(tmp_path):
    with pytest.raises(LedgerError, match="holds no ledger"):
        run_ledger(LedgerSettings(run=tmp_path))
