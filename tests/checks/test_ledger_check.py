"""`pellucid ledger`: the table, the verdict and the exit code."""

import json
from pathlib import Path

import pytest

from pellucid.checks.ledger import run_ledger
from pellucid.config.tools import LedgerSettings
from pellucid.data.alarms import Alarm, Bell, read_alarms
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
        "stages": {
            "inference": {"sampled": 1200, "delivered": 1000, "cancelled": 200},
            "orchestrator": {"received": 1000, "zero_advantage": 300, "sent": 700},
            "trainer": {"received": 700, "masked": 100, "trained": 599, **beside},
        },
        "differences": [{"run": "demo", "env": "reverse", "where": "trainer, step 0", "tokens": 1}],
        "bias": [],
        "alarms": [],
        "weights": None,
    }


def ring(run: Path, **changes: object) -> Alarm:
    values = {"name": "surprise", "step": 3, "statistic": "nats", "value": 0.25, "threshold": 0.05}
    Bell(run, {"surprise": "Top-k.", "reward": "Top-k."}).ring(
        **{**values, "p_value": 1e-9, "example": "", **changes}
    )
    return read_alarms(run)[-1]


def test_alarms_stand_below_the_verdict_and_leave_the_exit_code_alone(tmp_path, capsys):
    """An alarm is a statistic; whether the books balance is a fact."""
    first = ring(write_run(tmp_path))
    last = ring(tmp_path, name="reward", step=5, p_value=None, example="x" * 200)

    assert run_ledger(LedgerSettings(run=tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "balanced: every one of the 1,200 sampled tokens is accounted for",
        first.line(),
        last.line(),
    ]
    assert run_ledger(LedgerSettings(run=tmp_path, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["alarms"] == [
        {
            **{"name": "surprise", "step": 3, "statistic": "nats", "value": 0.25, "threshold": 0.05},
            **{"p_value": 1e-9, "example": "", "causes": "Top-k."},
        },
        {
            **{"name": "reward", "step": 5, "statistic": "nats", "value": 0.25, "threshold": 0.05},
            **{"p_value": None, "example": "x" * 200, "causes": "Top-k."},
        },
    ]
    assert run_ledger(LedgerSettings(run=write_run(tmp_path, trained=599))) == 1


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


FLOW = """\
sampled by the engine   1,200  100.0%
├─ cancelled              200   16.7%  given up while they were sampled
└─ to the orchestrator  1,000   83.3%
   ├─ zero_advantage      300   25.0%  an advantage of 0: nothing to learn from
   └─ to the trainer      700   58.3%
      ├─ masked           100    8.3%  outside of the trust region
      └─ trained          600   50.0%  their gradient is in the weights
"""


def test_the_flow_is_the_way_of_all_tokens(tmp_path, capsys):
    run_ledger(LedgerSettings(run=write_run(tmp_path)))
    assert capsys.readouterr().out.startswith(FLOW)


def test_the_flow_of_a_run_that_goes_on_has_what_waits_where_it_waits(tmp_path, capsys):
    """The trainer has 1 token of what it took in to book, and 100 to take in."""
    write_run(tmp_path, closed=False)
    trainer = {"received": 600, "masked": 100, "trained": 499, "computed": 599}
    journal(tmp_path, "trainer", {"reverse": trainer}, closed=False)
    assert run_ledger(LedgerSettings(run=tmp_path)) == 0
    output = capsys.readouterr().out
    assert [line.split()[1:3] for line in output.splitlines() if "waiting, or" in line] == [
        ["in_flight", "100"],
        ["in_flight", "1"],
    ]
    assert cells(output)["in_flight"] == ["101", "10.1%", "0", "0.0%", "101", "8.4%"]


def test_by_run_environments_are_added_up(tmp_path, capsys):
    run_ledger(LedgerSettings(run=write_run(tmp_path), by="run", json=True))
    (account,) = json.loads(capsys.readouterr().out)["accounts"]
    states = {"cancelled": 200, "zero_advantage": 300, "masked": 100, "trained": 600}
    assert (account["run"], account["sampled"], account["states"]) == ("demo", 1200, states)


def write_steps(run: Path, *, received: tuple[int, int] = (60, 80)) -> Path:
    """Two steps: 60 and 80 tokens sent; the trainer says what it received."""
    lines = {
        "inference": [{"counts": {"sampled": 150, "delivered": 150}}],
        "orchestrator": [
            {"step": 0, "counts": {"received": 70, "stale": 10, "sent": 60}},
            {"step": 1, "counts": {"received": 80, "sent": 80}},
        ],
        "trainer": [
            {"step": step, "counts": {"received": tokens, "trained": tokens, "computed": tokens}}
            for step, tokens in enumerate(received)
        ],
    }
    for stage, entries in lines.items():
        own = [{"stage": stage, "run": "demo", "env": "math", **entry} for entry in entries]
        path = run / "ledger" / f"{stage}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in [*own, {"stage": stage, "closed": True}]))
    return run


def test_by_step_there_is_a_line_for_each(tmp_path, capsys):
    run_ledger(LedgerSettings(run=write_steps(tmp_path), by="step"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "stale", "trained", "all"] in rows
    assert ["0", "10", "60", "70"] in rows and ["1", "0", "80", "80"] in rows
    run_ledger(LedgerSettings(run=tmp_path, by="step", json=True))
    assert json.loads(capsys.readouterr().out)["steps"] == [
        {"step": 0, "states": {"stale": 10, "trained": 60}},
        {"step": 1, "states": {"trained": 80}},
    ]


def test_two_mistakes_that_make_up_for_each_other_are_both_named(tmp_path, capsys):
    """A sample of 5 tokens that was trained in the wrong step."""
    assert run_ledger(LedgerSettings(run=write_steps(tmp_path, received=(65, 75)))) == 1
    where = "(run 'demo', environment 'math')"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"orchestrator to trainer, step 0: 5 tokens counted twice {where}",
        f"orchestrator to trainer, step 1: 5 tokens missing {where}",
    ]


def test_a_run_that_drops_its_long_rollouts_is_warned_of(tmp_path, capsys):
    write_run(tmp_path)
    for step in range(2):
        folder = tmp_path / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        lines = [
            {"outcome": "stale" if index % 3 == 0 else "sent", "env_name": "reverse", "reward": 0.5}
            | {"num_tokens": 90 + index % 5 if index % 3 == 0 else 10 + index % 7}
            for index in range(60)
        ]
        (folder / "train_rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run_ledger(LedgerSettings(run=tmp_path)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "bias: what is dropped as stale (40 of 120 rollouts) differs from what is kept: length 92"
    )
    run_ledger(LedgerSettings(run=tmp_path, audit=False))
    assert "bias" not in capsys.readouterr().out
