"""A command that is forked finds what one that is started finds, and ends like it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere commands are started for real")

PROBE = """
import atexit, logging, os, signal, sys, threading
handled = {name: str(signal.getsignal(getattr(signal, name))) for name in
           ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGUSR1")}
handled["SIGINT"] = handled["SIGINT"].split(" at ")[0]
print(__name__, __spec__.name, sys.modules["__main__"].__spec__.name)
print(os.getcwd(), sys.argv[1:], os.environ["OWN"], "PYTEST_CURRENT_TEST" in os.environ)
print([path for path in sys.path if "own" in path], handled, logging.root.handlers)
print(type(sys.stdout.buffer), sys.stdout.write_through, sys.stdout.line_buffering, sys.stdin.read())
print(sys.stderr.write_through, sys.stderr.line_buffering)
print(sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3], threading.active_count())
print(sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(3, 100)))
print(sys.stdout.errors, sys.stderr.errors, sys.stdout.encoding)
print("to standard error", file=sys.stderr)
atexit.register(print, "at exit")
thread = threading.Thread(target=lambda: print("a thread"))
thread.start()
thread.join()
if sys.argv[1] == "raise":
    raise RuntimeError("on purpose")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1] if sys.argv[1] != "none" else None)
"""


@pytest.mark.parametrize(
    ("end", "unbuffered"),
    [("none", "1"), ("3", "1"), ("300", ""), ("words", "1"), ("raise", ""), ("kill", "1")],
)
def test_a_fork_finds_what_a_start_finds_and_ends_like_it(tmp_path: Path, end: str, unbuffered: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "probe.py").write_text(PROBE)
    env = {**os.environ, "OWN": "1", "PYTHONPATH": str(tmp_path / "own-path"), "PYTHONUNBUFFERED": unbuffered}
    del env["PYTEST_CURRENT_TEST"]
    started = subprocess.run(
        [sys.executable, "-m", "probe", end],
        cwd=own, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    forked = warm.run([end], module="probe", cwd=own, env=env)
    assert forked.stdout.splitlines() == started.stdout.splitlines()
    assert forked.stderr.splitlines()[:1] == started.stderr.splitlines()[:1] == ["to standard error"]
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]
    assert forked.returncode == started.returncode


def test_a_fork_is_waited_for_and_killed_like_any_process(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    command = warm.start([], module="sleeper", cwd=tmp_path)
    with pytest.raises(TimeoutError):
        command.wait(0.01)
    assert command.poll() is None and command.returncode is None
    command.kill()
    assert command.wait() == command.poll() == -signal.SIGKILL


def test_the_parts_of_a_run_import_nothing_that_only_some_runs_need(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import sys\nprint([name for name in sys.argv[1:] if name in sys.modules])\n"
    )
    rare = ["peft", "datasets", "verifiers", "wandb", "tensorboard", "pyarrow", "pandas", "openai", "sklearn"]
    assert warm.run(["torch", "transformers", *rare], module="probe", cwd=tmp_path).stdout == (
        "['torch', 'transformers']\n"
    )
