"""What a process tells its launcher as it ends; and that it ends, whatever its threads are at."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pellucid.ending import LAUNCHER_PIPE, SILENCE_S, ProcessReport, describe_pipe, say, say_failure, working


def test_a_process_says_what_it_does_and_why_it_failed(launcher) -> None:
    before = time.monotonic()
    say("writing", at_stake="a file", silence_s=60)
    say("exiting")
    say_failure(OSError(errno.ENOSPC, "No space left on device", "ledger.jsonl"))
    first, second, third = launcher.hear(), launcher.hear(), launcher.hear()
    assert (first.doing, first.at_stake, first.silence_s) == ("writing", "a file", 60)
    assert (second.doing, second.at_stake, second.silence_s) == ("exiting", "", SILENCE_S)
    assert third.doing == ""
    assert third.failed == (
        "ledger.jsonl cannot be written (No space left on device); free some space and go on with --resume"
    )
    assert before <= first.at <= second.at <= third.at <= time.monotonic()


def test_what_was_said_can_be_told_from_beats(launcher) -> None:
    say("writing")
    with working("packing"):
        pass
    assert launcher.doings() == ["writing", "packing"]


def test_work_beats_while_the_process_computes_and_is_told_to_be_done(launcher) -> None:
    with working("packing", silence_s=60):
        assert launcher.hear().doing == "packing"
        hear = threading.Thread(target=lambda: beats.append(launcher.hear()))
        beats: list[ProcessReport] = []
        hear.start()
        while hear.is_alive():
            sum(range(1000))
    assert [report.beat for report in beats] == [True]
    done = launcher.hear()
    while done.beat:
        done = launcher.hear()
    assert (done.doing, done.failed) == ("", "")


def test_work_that_hangs_does_not_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it computes is told by a clock, here one that stands still."""
    from pellucid import ending

    sent: list[ProcessReport] = []
    looked, done = threading.Event(), threading.Event()
    times = iter([5.0, 5.0, 5.0, 7.0])

    def cpu_clock() -> float:
        value = next(times, None)
        if value is None:
            looked.set()
            return 7.0
        return value

    monkeypatch.setattr(ending, "_BEAT_EVERY_S", 0.001)
    monkeypatch.setattr(ending, "_send", sent.append)
    beating = threading.Thread(target=ending._beat_until, args=(done, cpu_clock))
    beating.start()
    looked.wait()
    done.set()
    beating.join()
    assert len(sent) == 1, "it beats when it computes, and only then"


def test_without_a_launcher_and_with_one_that_is_gone_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LAUNCHER_PIPE, raising=False)
    say("writing")
    with working("packing"):
        assert [thread for thread in threading.enumerate() if thread.name == "beat"] == []
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setenv(LAUNCHER_PIPE, describe_pipe(theirs))
    say("writing")
    os.close(theirs)


def test_another_file_under_the_number_of_the_pipe_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may inherit the environment without the pipe."""
    ours, theirs = os.pipe()
    monkeypatch.setenv(LAUNCHER_PIPE, describe_pipe(theirs))
    with (tmp_path / "journal").open("wb") as file:
        os.dup2(file.fileno(), theirs)
        say("writing")
    os.close(ours)
    os.close(theirs)
    assert (tmp_path / "journal").read_bytes() == b""


def test_a_launcher_that_does_not_read_keeps_nobody_waiting(launcher) -> None:
    for _ in range(2000):
        say("x" * 100)
    assert launcher.hear().doing == "x" * 100


HANGS = """
import threading, time
from pellucid.ending import QuickExit

def reward():
    time.sleep(600)

threading.Thread(target=reward, name="mine").start()
QuickExit().begin(7, within_s=0.2)
raise SystemExit(7)
"""

LIVES_ON = """
import atexit
from pellucid.ending import QuickExit

class Heavy:
    def __del__(self):
        print("deleted")

leaving = QuickExit()
heavy = Heavy()
atexit.register(print, "closed")
leaving.begin(3)
raise SystemExit(3)
"""


def test_a_thread_that_never_ends_does_not_keep_a_process_from_exiting() -> None:
    argv = [sys.executable, "-c", HANGS]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stderr == "not waiting any longer for thread mine (<string>:6 in reward)\n"


def test_what_is_registered_is_done_at_exit_and_nothing_is_deleted_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", LIVES_ON], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "closed\n")
