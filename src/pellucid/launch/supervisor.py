"""Starts the processes of a run, and ends them together.

    start ──> watch ──┬─ a child fails, or a service leaves early ──> stop the others, ProcessError
                      ├─ every child but the services ended with 0 ─> stop the services, return
                      └─ SIGINT, SIGTERM, SIGHUP ───────────────────> stop all, SystemExit(128 + signal)

No child outlives `supervise`. Each leads a session of its own, so that Ctrl-C in the terminal reaches the
launcher alone, which then stops workers before services: winding down may need the server. A child reports
through a pipe what it does to end (see `pellucid.ending`), and the launcher shows it. The launcher kills a
child at another signal, or once it is silent for longer than it announced; one that has announced nothing has
a grace period.

The launcher also kills what a child leaves behind in its process group. If the launcher itself is killed,
Linux kills the children (PR_SET_PDEATHSIG); on other systems they are left running.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import Signals
from threading import Thread
from typing import Literal

import msgspec

from pellucid.ending import LAUNCHER_PIPE, SILENCE_S, ProcessReport, describe_pipe
from pellucid.errors import DiskError, ProcessError

TICK_S = 0.25
_READ_OUT_S = 1.0
"""Seconds to read the last reports of a child that has exited; what it started may hold its pipe open."""

SHOW_AFTER_S = 1.0
"""Seconds after which a child's activity is shown; after that it is shown every `SHOW_EVERY_S`."""

SHOW_SPARE_AFTER_S = 5.0
"""The same for an activity with nothing at stake, such as the exit."""

SHOW_EVERY_S = 20.0
NUM_NAMES_SHOWN = 3
NUM_TAIL_BYTES = 64 * 1024
NUM_TAIL_LINES = 12
PR_SET_PDEATHSIG = 1
GOOD_ENDS = {0, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT}
"""Exit codes of a child that was told to stop: it may end by the signal, or handle it and say so."""

HINTS = {
    0: " before the run was over",
    DiskError.exit_code: " (the disk is full, or cannot be written to)",
    -signal.SIGKILL: " (the kernel does that when memory runs out)",
    **{128 + n: f" ({n.name}, and not from the launcher)" for n in (signal.SIGTERM, signal.SIGINT)},
}


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    argv: tuple[str, ...]
    log_path: Path
    """Receives standard output and standard error."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's environment."""

    service: bool = False
    """Runs until it is told to stop; before the others have ended, even exit code 0 is a failure."""


@dataclass(frozen=True, slots=True)
class Exit:
    name: str
    code: int
    """As `subprocess` reports it: minus the signal's number if one ended the process."""

    def __str__(self) -> str:
        killed = f"was killed by {Signals(-self.code).name}" if self.code < 0 else ""
        return f"{self.name} {killed or f'exited with code {self.code}'}{HINTS.get(self.code, '')}"


Outcome = Exit | Signals | Literal["done"]
"""How a run ends: by the exit that failed it, by a signal to the launcher, or with all steps done."""


def decide(
    children: Sequence[Child], exits: Sequence[Exit], interrupt: Signals | None = None
) -> Outcome | None:
    """Decides from the exits so far, in their order, how the run ends; None: it goes on."""
    workers = {child.name for child in children if not child.service}
    for end in exits:
        if end.code != 0 or (workers and end.name not in workers):
            return end
        workers.discard(end.name)
    return interrupt or (None if workers else "done")


class ChildState:
    """One child as its launcher knows it: the process, how it ended, and its latest report."""

    def __init__(self, child: Child, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.child = child
        self._grace_s = grace_s
        self._clock = clock
        self.process: subprocess.Popen[bytes] | None = None
        self.exited_at: float | None = None
        self.killed = ""
        """How the launcher killed it, in words; "" if it did not."""

        self.killed_spare = False
        self.failure: ProcessReport | None = None
        """Its report that it fails, with the time at which it first knew."""

        self._report: ProcessReport | None = None
        """Latest report of its activity; None: it has reported nothing, or is done."""

        self._since = 0.0
        """Time at which it began its activity, or the launcher stopped it."""

        self._heard_at = 0.0
        self._shown_at: float | None = None

    def hear(self, report: ProcessReport) -> None:
        self._heard_at = self._clock()
        if report.failed:
            # It may explain itself better later; its first report tells when it knew.
            self.failure = msgspec.structs.replace(report, at=self.failure.at if self.failure else report.at)
        elif not report.beat:
            self._report = report if report.doing else None
            self._since, self._shown_at = self._heard_at, None

    def note_stop(self) -> None:
        """Notes that the child was told to stop: from now on its silence counts."""
        self._heard_at = self._clock()
        if self._report is None:
            self._since = self._heard_at

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.exited_at is None

    @property
    def is_spare(self) -> bool:
        """Whether all that the child had to do is done, and killing it loses nothing."""
        return self._report is not None and not self._report.at_stake and self.failure is None

    @property
    def is_silent(self) -> bool:
        """Whether the child gave no sign of life for longer than it may."""
        return self._clock() - self._heard_at > self._silence_s

    @property
    def _silence_s(self) -> float:
        return self._grace_s if self._report is None else self._report.silence_s

    def describe_kill(self, when: str = "") -> str:
        """`trainer was killed after 600 s of silence while writing the checkpoint of step 40; lost …`."""
        killed = f"{self.child.name} was killed {when or f'after {self._silence_s:g} s of silence'}"
        if self._report is None:
            return f"{killed}; it had not said what it was doing"
        lost = f"lost may be {self._report.at_stake}" if self._report.at_stake else "nothing is lost"
        return f"{killed} while {self._report.doing}; {lost}"

    def due_activity(self) -> str | None:
        """Returns the child's activity when it is due to be shown, which it is if it takes long."""
        if self._report is None:
            return None
        now = self._clock()
        wait_s = SHOW_AFTER_S if self._report.at_stake else SHOW_SPARE_AFTER_S
        if self._shown_at is None and now - self._since >= wait_s:
            self._shown_at = now
            return self._report.doing
        if self._shown_at is not None and now - self._shown_at >= SHOW_EVERY_S:
            self._shown_at = now
            return f"{self._report.doing} ({now - self._since:.0f} s so far)"
        return None

    def failed_at(self) -> float:
        """Time at which the child knew that it fails, or else ended."""
        assert self.exited_at is not None
        return self.exited_at if self.failure is None else self.failure.at

    def has_failed(self, end: Exit) -> bool:
        """Whether a child that was told to stop had failed by itself."""
        return self.failure is not None or (end.code > 0 and end.code not in GOOD_ENDS)

    def explain(self, end: Exit) -> str:
        """Says how the child ended, why, and where its log is; on a full disk, by the child's own report."""
        how = self.killed or str(end)
        if self.failure and end.code in GOOD_ENDS:
            how = f"{end.name} failed"
        if self.failure and (end.code == DiskError.exit_code or end.code < 0):
            lines = f"error: {self.failure.failed}".splitlines()
        else:
            lines = [] if self.killed else read_cause(self.child.log_path)
        return "\n".join([how, *(f"  {line}" for line in lines), f"log: {self.child.log_path}"])


def due_lines(states: Iterable[ChildState]) -> list[str]:
    """Returns `trainer, trainer_1: writing the checkpoint of step 40` for activities that are due."""
    due: dict[str, list[str]] = {}
    for state in sorted(states, key=lambda state: state.child.name):
        if activity := state.due_activity():
            due.setdefault(activity, []).append(state.child.name)
    lines = []
    for activity, names in due.items():
        many = len(names) > NUM_NAMES_SHOWN
        lines.append(f"{f'{names[0]} and {len(names) - 1} others' if many else ', '.join(names)}: {activity}")
    return lines


def read_cause(log_path: Path) -> list[str]:
    with log_path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_TAIL_BYTES))
        return find_cause(file.read().decode(errors="replace"))


def find_cause(log: str) -> list[str]:
    """The last `error: …` with its indented lines, else the last traceback's end, else the last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    for prefix in ("error: ", "Traceback (most recent call last)"):
        if starts := [index for index, line in enumerate(lines) if line.startswith(prefix)]:
            lines = lines[starts[-1] :]
            end = 1 + len(list(takewhile(lambda line: line.startswith(" "), lines[1:])))
            if prefix == "error: ":
                return lines[:end]
            # The innermost frames, the exception, and the first lines after it: a message may have several.
            return lines[max(0, end - NUM_TAIL_LINES // 2) : end + NUM_TAIL_LINES // 2]
    return lines[-NUM_TAIL_LINES:]


_Event = Exit | Signals | tuple[str, ProcessReport]
"""A child's exit, a signal to the launcher, or (child, its report)."""


def supervise(
    children: Sequence[Child],
    *,
    on_tick: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda line: None,
    grace_s: float = SILENCE_S,
) -> None:
    """Runs `children` until they are done; `on_tick` is called a few times a second meanwhile.

    Call it from the main thread: signals arrive there, and Linux ties children to the thread that made them.
    """
    events: SimpleQueue[_Event] = SimpleQueue()
    fleet = _Fleet(children, events, say, grace_s)
    with _signals_into(events):
        try:
            fleet.start()
            outcome = fleet.watch(on_tick)
            match outcome:
                case Exit():
                    fleet.say(f"{outcome}; stopping the others")
                case Signals():
                    fleet.say(f"{outcome.name}: stopping; once more to kill at once")
                case _:
                    fleet.say("all steps done; stopping the services")
            num_exits = len(fleet.exits)
        finally:
            fleet.stop()
    late = fleet.exits[num_exits:]
    if isinstance(outcome, Exit):
        # A child that notices a failure may be quicker to end than the child that failed.
        failed = [outcome, *(end for end in late if fleet.states[end.name].has_failed(end))]
        failed.sort(key=lambda end: fleet.states[end.name].failed_at())
        kind = DiskError if DiskError.exit_code in {end.code for end in failed} else ProcessError
        raise kind("\nthen ".join(fleet.states[end.name].explain(end) for end in failed))
    if interrupt := outcome if isinstance(outcome, Signals) else fleet.interrupt:
        raise SystemExit(128 + interrupt)
    for end in late:
        if end.code not in GOOD_ENDS:
            raise ProcessError(fleet.states[end.name].explain(end))


class _Fleet:
    """The running children: the one place that starts, signals and reaps them.

    Exits, reports of children, and signals to the launcher arrive in one queue, in the order in which they
    happened.
    """

    def __init__(
        self,
        children: Sequence[Child],
        events: "SimpleQueue[_Event]",
        say: Callable[[str], object],
        grace_s: float,
    ) -> None:
        self.states = {child.name: ChildState(child, grace_s) for child in children}
        self._children = children
        self._events = events
        self._say = say
        self.exits: list[Exit] = []
        self.interrupt: Signals | None = None

    def say(self, line: str) -> None:
        """Shows a line; a terminal that is gone must not keep the children running."""
        with suppress(OSError):
            self._say(line)

    def start(self) -> None:
        waits = []
        try:
            for name, state in self.states.items():
                state.process, pipe = _start(state.child)
                waits.append(Thread(target=self._await_exit, args=(name, state.process, pipe), daemon=True))
        finally:
            for wait in waits:  # after the last fork: a process with threads must not fork a child
                wait.start()

    def watch(self, on_tick: Callable[[], None]) -> Outcome:
        while (outcome := decide(self._children, self.exits, self.interrupt)) is None:
            on_tick()
            workers = self._running(services=False)
            for state in workers:
                if state.is_spare and state.is_silent:
                    self._kill(state)
            if self.exits:
                self._show(workers)
            self._receive()
        return outcome

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL to those that fall silent, or to all at a signal; workers first."""
        self.interrupt = None
        for services in (False, True):
            for state in self._running(services=services):
                self._signal(state, signal.SIGTERM)
                state.note_stop()
            while running := self._running(services=services):
                for state in running:
                    if self.interrupt is not None:
                        self._kill(state, f"at the second {self.interrupt.name}")
                    elif state.is_silent:
                        self._kill(state)
                self._show(running)
                self._receive()

    def _running(self, *, services: bool) -> list[ChildState]:
        return [
            state for state in self.states.values() if state.is_running and state.child.service is services
        ]

    def _show(self, states: Sequence[ChildState]) -> None:
        for line in due_lines(state for state in states if not state.killed):
            self.say(line)

    def _kill(self, state: ChildState, when: str = "") -> None:
        if not state.killed:
            state.killed, state.killed_spare = state.describe_kill(when), state.is_spare
            self._signal(state, signal.SIGKILL)
            self.say(state.killed)

    def _signal(self, state: ChildState, number: Signals) -> None:
        if state.process is not None and state.process.returncode is None:
            _signal_group(state.process.pid, number)

    def _receive(self) -> None:
        """Takes an event. A signal that arrives just before the wait is seen only after it: keep it short."""
        with suppress(Empty):
            match self._events.get(timeout=TICK_S):
                case Exit() as end:
                    state = self.states[end.name]
                    state.exited_at = time.monotonic()
                    self.exits.append(replace(end, code=0) if state.killed_spare else end)
                case Signals() as interrupt:
                    self.interrupt = interrupt
                case (name, report):
                    self.states[name].hear(report)

    def _await_exit(self, name: str, process: subprocess.Popen[bytes], pipe: int) -> None:
        reader = Thread(target=self._listen, args=(name, pipe), daemon=True)
        reader.start()
        code = process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        reader.join(_READ_OUT_S)
        self._events.put(Exit(name, code))

    def _listen(self, name: str, pipe: int) -> None:
        with open(pipe, "rb") as lines:
            for line in lines:
                with suppress(msgspec.DecodeError):  # from code that writes to any descriptor it finds
                    self._events.put((name, msgspec.json.decode(line, type=ProcessReport)))


def _start(child: Child) -> tuple[subprocess.Popen[bytes], int]:
    """Returns the process, and the end of the pipe from which its reports are read."""
    child.log_path.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)  # a child never waits for its launcher
    try:
        with child.log_path.open("wb") as log:
            process = subprocess.Popen(
                child.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    LAUNCHER_PIPE: describe_pipe(theirs),
                    **child.env,
                },
                pass_fds=[theirs],
                start_new_session=True,
                preexec_fn=_die_with_launcher(),
            )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours


def _die_with_launcher() -> Callable[[], None] | None:
    """Returns a function for the child to call before it runs its program: Linux then kills it with the
    launcher.

    None on other systems.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it was killed before the call above
            os._exit(1)

    return tie


def _signal_group(group: int, number: Signals) -> None:
    # A group that is gone already; macOS says "not permitted" of one that only awaits reaping.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextmanager
def _signals_into(events: "SimpleQueue[_Event]") -> Iterator[None]:
    """Context manager: signals to the launcher become events; exceptions could interrupt a stop."""

    def put(number: int, frame: object) -> None:
        events.put(Signals(number))

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    trapped = [signal.SIGINT, signal.SIGTERM, *([] if nohup else [signal.SIGHUP])]
    before = {number: signal.signal(number, put) for number in trapped}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
