"""The command line: which function runs with which config, and how it ends."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid import __version__
from pellucid.cli import COMMANDS, Command, main
from pellucid.config import TrainerRunConfig
from pellucid.config.tools import LedgerSettings

RUNS = """
import logging
from pellucid.errors import LedgerError

calls = []

def succeed(config):
    calls.append(config)
    logging.getLogger("pellucid.runs").info("running")
    logging.getLogger("pellucid.runs").debug("details")
    logging.getLogger("other").info("noise")

def find_problems(config):
    return 3

def fail(config):
    raise LedgerError("2 tokens are missing\\nfrom step 1")

def interrupt(config):
    raise KeyboardInterrupt
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module with run functions, and a table of commands that names them."""
    (tmp_path / "runs.py").write_text(RUNS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "runs", raising=False)
    return {
        name: Command(LedgerSettings, f"runs:{name}", "…")
        for name in ("succeed", "find_problems", "fail", "interrupt")
    }


def test_a_command_runs_its_function_with_its_config(runs):
    assert main(["succeed", "outputs/run", "--json"], runs) == 0
    import runs as module  # the fixture puts it on the path

    assert module.calls == [LedgerSettings(run=Path("outputs/run"), json=True)]


def test_a_run_function_may_return_an_exit_code(runs):
    assert main(["find_problems", "outputs/run"], runs) == 3


def test_an_error_is_printed_without_a_traceback(runs, capsys):
    assert main(["fail", "outputs/run"], runs) == 1
    assert capsys.readouterr() == ("", "error: 2 tokens are missing\n       from step 1\n")


def test_an_interrupt_exits_with_130(runs, capsys):
    assert main(["interrupt", "outputs/run"], runs) == 130
    assert capsys.readouterr() == ("", "")


def test_a_config_error_exits_with_2_and_runs_nothing(capsys):
    assert main(["trainer", "--sed", "1", "--max-steps", "0"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: --sed: unknown flag; did you mean --seed?\n"
        "       model.name is missing; set it in a file or with --model.name\n"
        "       max_steps = '0': should be greater than or equal to 1\n",
    )


def test_a_dry_run_prints_a_config_that_can_be_read_back(capsys, tmp_path):
    assert main(["trainer", "--model.name", "m", "--seed", "3", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "run.toml").write_text(printed)
    assert main(["trainer", "@", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
    assert "seed = 3\n" in printed


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_lists_every_command(argv, capsys):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]"
    assert lines[2 : 2 + len(COMMANDS)] == [
        f"  {name:<14}{command.help}" for name, command in COMMANDS.items()
    ]


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pellucid {__version__}\n"


@pytest.mark.parametrize(
    ("name", "remedy"), [("trianer", "did you mean trainer?"), ("xyz", "see `pellucid --help`")]
)
def test_an_unknown_command_suggests_the_nearest(name, remedy, capsys):
    assert main([name]) == 2
    assert capsys.readouterr().err == f"error: {name}: unknown command; {remedy}\n"


def test_an_unknown_log_level_is_refused(runs, capsys, monkeypatch):
    monkeypatch.setenv("PELLUCID_LOG_LEVEL", "loud")
    assert main(["succeed", "outputs/run"], runs) == 2
    assert capsys.readouterr().err == (
        "error: PELLUCID_LOG_LEVEL = 'loud': should be DEBUG, INFO, WARNING or ERROR\n"
    )


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("info", ["INFO running"]),
        ("debug", ["INFO running", "DEBUG details"]),
        ("warning", []),
    ],
)
def test_logs_go_to_stderr_with_time_and_level(level, messages, tmp_path):
    (tmp_path / "runs.py").write_text(RUNS)
    script = (
        "import sys; from pellucid.cli import Command, main; "
        "from pellucid.config.tools import LedgerSettings; "
        "sys.exit(main(['run', 'x'], {'run': Command(LedgerSettings, 'runs:succeed', '')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PELLUCID_LOG_LEVEL": level},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in done.stderr.splitlines()] == messages


def test_answering_without_running_does_not_import_torch():
    script = (
        "import sys; from pellucid.cli import main; "
        "main(['trainer', '--model.name', 'm', '--dry-run']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "(No space left on device); free some space and try again"),
        (errno.EDQUOT, "(Disk quota exceeded); free some space, or ask for a larger quota and try again"),
        (errno.EROFS, "(Read-only file system); make it writable and try again"),
        (errno.EFBIG, "(File too large); raise the limit on the size of files (`ulimit -f`) and try again"),
    ],
)
def test_a_disk_that_takes_no_more_is_no_traceback(runs, capsys, number, message):
    import runs as module

    def fill(config):
        raise OSError(number, os.strerror(number), "a/b.jsonl")

    module.succeed = fill
    assert main(["succeed", "outputs/run"], runs) == 74
    assert capsys.readouterr().err == f"error: a/b.jsonl cannot be written {message}\n"


def test_a_run_on_a_full_disk_can_be_resumed(runs, capsys):
    import runs as module

    def fill(config):
        raise OSError(errno.ENOSPC, "No space left on device")

    module.succeed = fill
    commands = {"trainer": Command(TrainerRunConfig, "runs:succeed", "…")}
    assert main(["trainer", "--model.name", "m"], commands) == 74
    assert capsys.readouterr().err == (
        "error: a file cannot be written (No space left on device); free some space and go on with --resume\n"
    )


def test_any_other_error_of_the_system_keeps_its_traceback(runs):
    import runs as module

    def fail(config):
        raise FileNotFoundError("a/b.jsonl")

    module.succeed = fail
    with pytest.raises(FileNotFoundError):
        main(["succeed", "outputs/run"], runs)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_the_exit_code_tells_what_no_log_can(tmp_path):
    (tmp_path / "runs.py").write_text("def fill(config): open('/dev/full', 'wb', buffering=0).write(b'x')")
    script = (
        "import sys; from pellucid.cli import Command, main; "
        "from pellucid.config.tools import LedgerSettings; "
        "sys.exit(main(['run', 'x'], {'run': Command(LedgerSettings, 'runs:fill', '')}))"
    )
    with open("/dev/full", "wb") as log:
        done = subprocess.run([sys.executable, "-u", "-c", script], cwd=tmp_path, stdout=log, stderr=log)
    assert done.returncode == 74


def test_an_error_in_somebodys_own_code_is_printed_with_its_traceback(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_env.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    from pellucid.config.imports import load_attribute

    def load(config):
        load_attribute("broken_env:Env", "orchestrator.env.id")

    (tmp_path / "loads.py").write_text("load = None")
    import loads  # on the path since the line above

    loads.load = load
    assert main(["load", "x"], {"load": Command(LedgerSettings, "loads:load", "…")}) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "RuntimeError: not today"
    assert last == (
        "error: orchestrator.env.id = 'broken_env:Env' cannot be imported: "
        f"RuntimeError: not today ({tmp_path / 'broken_env.py'}:2)"
    )


AS_A_CONSOLE_SCRIPT = (
    "import sys; sys.path.remove(''); from pellucid.cli import Command, main; "
    "from pellucid.config.tools import LedgerSettings; "
    "sys.exit(main(['run', 'x'], {'run': Command(LedgerSettings, 'runs:find_problems', '')}))"
)


@pytest.mark.parametrize(("options", "code"), [([], 3), (["-P"], 1)])
def test_modules_of_the_current_folder_are_found(tmp_path, options, code):
    """Unless Python was told not to look there."""
    (tmp_path / "runs.py").write_text(RUNS)
    script = AS_A_CONSOLE_SCRIPT.replace("sys.path.remove(''); ", "") if options else AS_A_CONSOLE_SCRIPT
    done = subprocess.run([sys.executable, *options, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == code


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "pellucid", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"pellucid {__version__}\n")


DRY_RUN = """
import sys
from pellucid.data import Example
from pellucid.orchestrator import Score, SingleTurnEnvironment

class Good(SingleTurnEnvironment):
    def example(self, index):
        return Example(str(index), [{"role": "user", "content": "hi"}])

    def reward(self, example, text):
        return Score(1.0)

class Odd(Good):
    def example(self, index):
        return "hi"

class Unmakeable(Good):
    def __init__(self, *, seed):
        raise RuntimeError("no data")

def advantage(inputs, scale):
    return None

not_callable = 1
"""


@pytest.mark.parametrize(
    ("argv", "code", "complaint"),
    [
        ([], 0, ""),
        (["--model.name", "./nowhere"], 1, "model.name = './nowhere': no such folder"),
        (["--orchestrator.env", '[{"id": "dry:Odd"}]'], 1, "Odd.example (dry.py:14) returned 'hi' (str)"),
        (["--orchestrator.env", '[{"id": "dry:None"}]'], 2, "module 'dry' has no attribute 'None'"),
        (["--orchestrator.env", '[{"id": "dry:Unmakeable"}]'], 2, "RuntimeError: no data (dry.py:19)"),
        (["--orchestrator.eval", '[{"id": "dry:Unmakeable"}]'], 2, "RuntimeError: no data (dry.py:19)"),
        (
            ["--orchestrator.advantage", '{"type": "custom", "import_path": "dry:advantage"}'],
            2,
            "orchestrator.advantage.import_path = 'dry:advantage' cannot be called with its inputs and "
            "orchestrator.advantage.kwargs = {}: missing a required argument: 'scale'; it takes (inputs, ",
        ),
        (
            ["--trainer.loss", '{"type": "custom", "import_path": "dry:not_callable"}'],
            2,
            "trainer.loss.import_path = 'dry:not_callable' is 1; name a function",
        ),
        (["--orchestrator.filter", '[{"import_path": "dry:nothing"}]'], 2, "has no attribute 'nothing'"),
    ],
)
def test_a_dry_run_imports_and_makes_what_it_can(argv, code, complaint, tmp_path, capsys, monkeypatch):
    """The resolved configuration comes first, whatever is found."""
    (tmp_path / "dry.py").write_text(DRY_RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "dry", raising=False)
    command = ["rl", "--model.name", "m", *argv, "--dry-run"]
    if "--orchestrator.env" not in argv:
        command += ["--orchestrator.env", '[{"id": "dry:Good"}]']
    assert main(command) == code
    printed = capsys.readouterr()
    assert printed.out.startswith('output_dir = "outputs/run"\n')
    assert complaint in printed.err and bool(complaint) == bool(printed.err)
    assert "Traceback" in printed.err if "RuntimeError" in complaint else "Traceback" not in printed.err
    assert not (tmp_path / "outputs").exists()
