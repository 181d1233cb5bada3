"""A test that hangs ends with its name and its stack; all the others run, and the run says so."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"

STUCK = """
import ctypes


def test_is_stuck_in_c():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # which no signal interrupts, and which gives Python no turn
"""

LATER = """
import time


def test_is_slow():
    time.sleep(0.7)  # so that the two workers do not write their stacks to one stream at the same time
"""

OTHERS = """
import threading

import pytest


def test_waits():
    threading.Event().wait()


@pytest.mark.parametrize("number", range(4))
def test_goes_on(number):
    pass
"""


def test_a_hung_test_ends_with_its_name_and_stack_and_not_with_the_run(tmp_path) -> None:
    """With the options of the suite, except that its patience is one second."""
    options = tomllib.loads(PYPROJECT.read_text())["tool"]["pytest"]["ini_options"]
    assert 60 <= options["timeout"] < options["faulthandler_timeout"]
    names = ("timeout", "timeout_method", "faulthandler_timeout", "faulthandler_exit_on_timeout")
    settings = {name: options[name] for name in names} | {"timeout": 1, "faulthandler_timeout": 4}
    lines = [f"{name} = {str(value).lower()}" for name, value in settings.items()]
    (tmp_path / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
    (tmp_path / "conftest.py").write_text("from workers import pytest_xdist_make_scheduler")
    (tmp_path / "test_alone.py").write_text(STUCK.replace("\n\n\ndef", f"\n{LATER}\n\ndef", 1))
    (tmp_path / "test_some.py").write_text(STUCK + OTHERS)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    outside["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--dist", "loadfile"]
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "= 3 failed, 5 passed in " in done.stdout, done.stdout
    assert "FAILED test_some.py::test_waits - Failed: Timeout" in done.stdout
    assert "    threading.Event().wait()" in done.stdout
    for file in ("test_alone.py", "test_some.py"):
        assert f"crashed while running '{file}::test_is_stuck_in_c'" in done.stdout
        assert re.search(rf'{file}", line \d+ in test_is_stuck_in_c', done.stderr)
