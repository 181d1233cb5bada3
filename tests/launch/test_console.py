"""A step in one line of text, on a terminal and without one."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import pellucid
from pellucid.checks.finding import Finding, findings_table
from pellucid.launch.console import (
    RL_COLUMNS,
    SFT_COLUMNS,
    STATUS_EVERY_S,
    VALIDATED_SFT_COLUMNS,
    WIDTH,
    LiveView,
    PlainView,
    StepColumn,
    has_terminal,
    header_row,
    make_console,
    open_view,
    step_row,
    summary_panel,
)

ROOT = Path(pellucid.__file__).parent

RECORD = {
    "step": 17,
    "reward/all": 0.53125,
    "loss": -0.0123,
    "entropy/all/mean": 1.25,
    "mismatch_kl/all/mean": 0.000123,
    "tokens": 6598,
    "throughput/tokens_per_s": 12345.6,
    "off_policy_level/all/mean": 0.5,
    "time/step_s": 0.534,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_row_of_an_rl_run():
    assert header_row(RL_COLUMNS) == (
        "  step    reward        loss   entropy  mismatch KL     tokens    tokens/s  off-policy       time"
    )
    assert step_row(RECORD, RL_COLUMNS) == (
        "    17    0.5312     -0.0123    1.2500     1.23e-04      6,598      12,346        0.50     0.53 s"
    )


@pytest.mark.parametrize("columns", [RL_COLUMNS, SFT_COLUMNS, VALIDATED_SFT_COLUMNS])
def test_rows_fit_in_the_width(columns):
    assert len(header_row(columns)) == len(step_row(RECORD, columns)) <= WIDTH


def test_the_validation_loss_stands_beside_the_loss():
    record = {"step": 49, "loss": 1.5, "validation/loss": 1.625, "grad_norm": 0.5, "lr": 1e-3}
    assert step_row(record, VALIDATED_SFT_COLUMNS).split()[:3] == ["49", "1.5000", "1.6250"]
    assert step_row({"step": 50, "loss": 1.5}, VALIDATED_SFT_COLUMNS).split()[2] == "-"


def test_a_missing_value_is_a_dash_and_one_that_is_not_finite_is_nan():
    columns = (StepColumn("step", "step", 4, "{:d}"), StepColumn("loss", "loss", 6, "{:.2f}"))

    assert step_row({"step": 1}, columns) == "   1       -"
    assert step_row({"step": 1, "loss": None}, columns) == "   1     nan"
    assert step_row({"step": 1, "loss": float("inf")}, columns).split() == ["1", "inf"]


def test_a_skipped_step_has_a_line_of_its_own():
    lines: list[str] = []
    view = PlainView((StepColumn("step", "step", 4, "{:d}"),), lines.append)
    view.show({"step": 6, "skipped_steps": 0})
    view.show({"step": 7, "skipped_steps": 1})
    assert lines[2:] == [
        "   7",
        "step 7 is skipped: its loss or gradient is not finite; the trainer's log has the cause",
    ]
    assert len(lines[3]) <= WIDTH


def test_plain_lines_repeat_the_header_every_25_steps():
    lines: list[str] = []
    columns = (StepColumn("step", "step", 4, "{:d}"),)
    view = PlainView(columns, lines.append)

    for step in range(26):
        view.show({"step": step})

    assert [number for number, line in enumerate(lines) if line == "step"] == [0, 26]
    assert lines[1:3] == ["   0", "   1"]
    assert len(lines) == 28


def test_plain_lines_tell_the_status_only_while_no_step_comes():
    lines: list[str] = []
    now = 100.0
    view = PlainView((StepColumn("step", "step", 4, "{:d}"),), lines.append, clock=lambda: now)
    view.status(["step 0: 1 running"])
    assert lines == []
    now += STATUS_EVERY_S
    view.status(["step 0: 2 running", "  the first: it failed"])
    view.status(["step 0: 3 running"])
    assert lines == ["step 0: 2 running", "  the first: it failed"]
    now += STATUS_EVERY_S
    view.status(["step 0: 2 running", "  the first: it failed"])  # nothing new
    assert len(lines) == 2
    view.show({"step": 0})
    view.status(["step 1: 3 running"])
    assert lines[2:] == ["step", "   0"]
    now += STATUS_EVERY_S
    view.status(["step 1: 3 running"])
    assert lines[4:] == ["step 1: 3 running"]


def test_a_note_between_two_steps():
    out = io.StringIO()
    view = open_view((StepColumn("step", "step", 4, "{:d}"),), 2, Console(file=out, width=40))
    view.show({"step": 0})
    view.note("eval    1  held-out  avg@1 0.500 [b]")
    view.show({"step": 1})

    assert out.getvalue() == "step\n   0\neval    1  held-out  avg@1 0.500 [b]\n   1\n"


def test_brackets_and_colons_of_a_user_stand_for_themselves(capsys):
    """In lines, cells, headers and titles: names, paths and texts are never markup."""
    text = "env[v2] [red]x[/red] [/] :smile:"
    finding = Finding("masks", text, 2.0, 1.0, meaning=text)
    table = Table("head " + text, title="title " + text)
    table.add_row(text)
    summary = summary_panel("run " + text, [], [("model", f"outputs/{text}")], WIDTH)
    console = make_console()
    for printed in (text, table, findings_table([finding]), summary):
        console.print(printed)
    shown = capsys.readouterr().out
    assert shown.count(text) == 1 + 3 + 2 + 2


def test_consoles_are_made_in_one_place():
    """Others would take brackets for markup."""
    made = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"\bConsole\((?!.*markup=False)", path.read_text())
    }
    assert made == {"checks/replay/__init__.py"}  # a progress bar with a text of ours


def test_without_a_terminal_every_step_is_written_at_once():
    out = io.StringIO()
    view = open_view(RL_COLUMNS, 100, Console(file=out, width=40))

    view.show(RECORD)

    assert out.getvalue() == f"{header_row(RL_COLUMNS)}\n{step_row(RECORD, RL_COLUMNS)}\n"


def test_colour_forced_into_a_pipe_is_still_no_terminal():
    assert not has_terminal(Console(file=io.StringIO(), force_terminal=True))
    assert has_terminal(Console(file=Terminal(), force_terminal=True, _environ={"TERM": "xterm"}))


def test_a_terminal_shows_the_latest_steps_and_the_progress():
    out = Terminal()
    console = Console(file=out, width=100, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    view = open_view(RL_COLUMNS, 100, console)
    assert isinstance(view, LiveView)

    for step in range(20):
        view.show({**RECORD, "step": step})
    out.truncate(0)
    view.status(["step 20: 3 rollouts ready [x]", "  the first: it failed"])
    view.refresh()
    frame = out.getvalue()
    out.truncate(0)
    view.note("eval   20  held-out  avg@1 0.500")
    noted = out.getvalue()
    view.close()

    shown = [line.split()[0] for line in frame.splitlines() if "0.5312" in line]
    assert shown == [str(step) for step in range(8, 20)]
    assert "20/100" in frame
    assert "s/step" in frame
    assert (
        frame.index("20/100") < frame.index("step 20: 3 rollouts ready [x]") < frame.index("  the first: it")
    )
    assert noted.index("eval   20  held-out  avg@1 0.500\n") < noted.index("20/100")
