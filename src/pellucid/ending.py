"""Reports of a process to its launcher as it ends: its activity, a beat while it makes progress, why it
failed.

    {"at":81.2,"doing":"writing the checkpoint of step 40","at_stake":"steps 31 to 40","silence_s":600.0}
    {"at":82.2,"beat":true}                       it makes progress
    {"at":83.0,"failed":"ledger/inference.jsonl cannot be written (No space left on device); …"}

The launcher waits for a process until it is silent for longer than it announced. The lines go through a pipe,
so that a process can report even on a full disk; the descriptor is in the environment. A process that was
started on its own has no launcher, and reports nothing.
"""

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from pellucid.errors import DiskError, PellucidError

logger = logging.getLogger(__name__)

LAUNCHER_PIPE = "PELLUCID_LAUNCHER_PIPE"
"""Environment variable with the descriptor of the pipe to the launcher; see `describe_pipe`."""

SILENCE_S = 10.0
"""Seconds that a process that reports nothing may take to end."""

DISK_SILENCE_S = 600.0
"""The same while it writes to disk: flushing gigabytes to a slow one shows no progress for minutes."""

SINK_SILENCE_S = 120.0
"""The same while trackers of metrics upload the rest; wandb gives up after 60 s."""

EXIT_S = 10.0
"""Seconds that Python may take to exit once everything is closed: it joins threads, of environments too."""

_BEAT_EVERY_S = 1.0
_BUSY_SHARE = 0.001
"""Share of the time since the last beat that a process computes for at least while it gets on; threads that
only poll stay below a tenth of it."""


class ProcessReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line to the launcher; without `doing`, `failed` and `beat`: what it was doing is done."""

    at: float
    """`time.monotonic()`, which all processes of a machine share."""

    doing: str = ""
    at_stake: str = ""
    """Loss if the process is killed during the activity, in words; "" if nothing is lost."""

    silence_s: float = SILENCE_S
    failed: str = ""
    beat: bool = False


def say(doing: str, *, at_stake: str = "", silence_s: float = SILENCE_S) -> None:
    """Tells the launcher what this process does from now on in order to end. Safe in a signal handler."""
    _send(ProcessReport(time.monotonic(), doing, at_stake, silence_s))


def say_failure(error: BaseException) -> None:
    """Tells the launcher that this process fails, before others notice: they may end sooner than it does."""
    if isinstance(error, OSError) and error.errno in DiskError.REMEDIES:
        error = DiskError.of(error)
    reason = str(error) if isinstance(error, PellucidError) else f"{type(error).__name__}: {error}"
    _send(ProcessReport(time.monotonic(), failed=reason))


@contextmanager
def working(doing: str, *, at_stake: str = "", silence_s: float = SILENCE_S) -> Iterator[None]:
    """Context manager: reports the activity, and a beat as long as this process computes or writes."""
    if LAUNCHER_PIPE not in os.environ:
        yield
        return
    say(doing, at_stake=at_stake, silence_s=silence_s)
    done = threading.Event()
    threading.Thread(target=_beat_until, args=(done,), name="beat", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _send(ProcessReport(time.monotonic()))


def _beat_until(done: threading.Event, cpu_clock: Callable[[], float] = time.process_time) -> None:
    last, busy = time.monotonic(), cpu_clock()
    while not done.wait(_BEAT_EVERY_S):
        now, total = time.monotonic(), cpu_clock()
        if total - busy >= _BUSY_SHARE * (now - last):
            _send(ProcessReport(now, beat=True))
            last, busy = now, total


def describe_pipe(fd: int) -> str:
    """`6 13:48213`: a descriptor and the file behind it.

    A process that inherits the environment but not the pipe may have another file under that number.
    """
    status = os.fstat(fd)
    return f"{fd} {status.st_dev}:{status.st_ino}"


def _send(report: ProcessReport) -> None:
    """Never waits and never fails: the pipe does not block, and a launcher that is gone needs no report."""
    if (pipe := os.environ.get(LAUNCHER_PIPE)) is not None:
        with suppress(OSError):
            fd = int(pipe.partition(" ")[0])
            if describe_pipe(fd) == pipe:
                os.write(fd, msgspec.json.encode(report) + b"\n")


class QuickExit:
    """Ends this process soon after everything is written and closed, whatever its threads do.

    Make it before anything else is imported: Python then calls it last at exit, and it skips the rest.
    Deleting every object takes a second of computing with torch, and 10 s on a busy machine.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def begin(self, code: int, within_s: float = EXIT_S) -> None:
        """From now on the process exits with `code`, even if a thread that Python joins never ends."""
        self._code = code
        say("exiting", silence_s=within_s + SILENCE_S)
        threading.Thread(target=self._leave_after, args=(within_s,), name="exit", daemon=True).start()

    def _leave_after(self, seconds: float) -> None:
        time.sleep(seconds)
        with suppress(OSError):
            logger.warning("not waiting any longer for %s", ", ".join(_running()) or "Python to exit")
        self._leave()

    def _leave(self) -> None:
        if self._code is not None:
            with suppress(OSError, ValueError):  # of a full disk, or a stream that is closed
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(self._code)


def _running() -> list[str]:
    """Returns the threads that Python waits for, each with the line that it is at."""
    frames = sys._current_frames()
    found = []
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread() or thread.ident not in frames:
            continue
        place = traceback.extract_stack(frames[thread.ident])[-1]
        found.append(f"thread {thread.name} ({place.filename}:{place.lineno} in {place.name})")
    return found
