"""A run on three hosts without a shared disk; `make test-network` strikes for longer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lossy_network import Weather, why_not
from three_hosts import Planned, rough_ride, table

FAULTS = [
    Planned("cut, delivered late", ("trainer", "orchestrator"), 1.5, holds=True),  # it is never silent
    Planned("cut, host killed", ("trainer", "orchestrator"), 1.0, "inference"),
    Planned("host hangs", ("trainer", "inference"), 1.5, "trainer"),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_three_hosts_survives_cuts_kills_and_hangs(tmp_path) -> None:
    weather = Weather(delay_s=0.02, loss=0.05)
    report = rough_ride(tmp_path, faults=lambda _: iter(FAULTS), weather=weather, seed=0, say=print)
    assert [fault["kind"] for fault in report["faults"]] == [planned.kind for planned in FAULTS]
    assert report["packets"]["lost"] > 0 and report["packets"]["late"] > 0 and report["packets"]["cut"] > 0
    assert report["versions_verified"] > 0
    assert len(table(report).splitlines()) == 2 + len(FAULTS)


DYING = """
import os, signal, subprocess, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from lossy_network import Host

host = Host("only", 1, Path({folder!r}), [])
enter = ["nsenter", f"--net={{host.namespaces}}/net", "sleep", "600"]
running = subprocess.Popen(enter, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
while os.readlink(f"/proc/{{running.pid}}/ns/net") != os.readlink(host.namespaces / "net"):
    pass
print(host.holder.pid, running.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_host_ends_with_all_that_runs_there_when_its_test_is_killed(tmp_path) -> None:
    script = DYING.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    died = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert died.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60.0
    for pid in map(int, died.stdout.split()):
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} outlived the test"
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    """False also for a process that has ended and for whose end nobody has asked."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != ""
    except OSError:
        return False
