"""Starts the processes of a run, and ends them together.

    start ──> watch ──┬─ a child fails, or a service leaves early ──> stop the others, ProcessError
                      ├─ every child but the services ended with 0 ─> stop the services, return
                      └─ SIGINT, SIGTERM, SIGHUP ───────────────────> stop all, SystemExit(128 + signal)

No child outlives `supervise`. Each leads a session of its own, so that Ctrl-C in the terminal reaches the
launcher alone, which then stops workers before services: winding down may need the server. What a child
leaves behind in its process group goes with it. If the launcher itself is killed outright, Linux kills the
children (PR_SET_PDEATHSIG); other systems have no such call, and there they are left running.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import Signals
from threading import Thread

from pellucid.errors import DiskError, ProcessError
from pellucid.launch.log_tail import read_cause

GRACE_S = 10.0
TICK_S = 0.25
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ends; neither failed nor interrupted is a finished run."""

    failure: Exit | None = None
    interrupt: Signals | None = None


def decide(
    children: Sequence[Child], exits: Sequence[Exit], interrupt: Signals | None = None
) -> Outcome | None:
    """What the exits so far, in their order, mean for the run; None: it goes on."""
    workers = {child.name for child in children if not child.service}
    for end in exits:
        if end.code != 0 or (workers and end.name not in workers):
            return Outcome(failure=end)
        workers.discard(end.name)
    if interrupt is not None:
        return Outcome(interrupt=interrupt)
    return None if workers else Outcome()


def supervise(
    children: Sequence[Child],
    *,
    on_tick: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda line: None,
    grace_s: float = GRACE_S,
) -> None:
    """Runs `children` until they are done; `on_tick` is called a few times a second meanwhile.

    Call it from the main thread: signals arrive there, and Linux ties children to the thread that made them.
    """
    events: SimpleQueue[Exit | Signals] = SimpleQueue()
    fleet = _Fleet(children, events)
    with _signals_into(events):
        try:
            fleet.start()
            outcome = fleet.watch(on_tick)
            say(_announce(outcome))
            num_exits = len(fleet.exits)
        finally:
            fleet.stop(grace_s)
    _raise(outcome, fleet, fleet.exits[num_exits:], grace_s)


def _announce(outcome: Outcome) -> str:
    if outcome.failure:
        return f"{outcome.failure}; stopping the others"
    if outcome.interrupt:
        return f"{outcome.interrupt.name}: stopping; once more to kill at once"
    return "all steps done; stopping the services"


def _raise(outcome: Outcome, fleet: "_Fleet", late: Sequence[Exit], grace_s: float) -> None:
    """The error of a run that did not finish; `late` are the exits after it was told to stop."""
    late = [end for end in late if end.code not in GOOD_ENDS]
    if outcome.failure:
        # The first to notice a failure is not always the one that failed.
        also = [f"then {_explain(end, fleet.log_path(end))}" for end in late if end.code > 0]
        raise ProcessError("\n".join([_explain(outcome.failure, fleet.log_path(outcome.failure)), *also]))
    if interrupt := outcome.interrupt or fleet.interrupt:
        raise SystemExit(128 + interrupt)
    if late:
        end, log = late[0], fleet.log_path(late[0])
        if end.code != -signal.SIGKILL:
            raise ProcessError(_explain(end, log))
        raise ProcessError(
            f"{end.name} did not stop within {grace_s:g} s of SIGTERM and was killed\nlog: {log}"
        )


def _explain(end: Exit, log_path: Path) -> str:
    return "\n".join([str(end), *(f"  {line}" for line in read_cause(log_path)), f"log: {log_path}"])


class _Fleet:
    """The running children: the one place that starts, signals and reaps them.

    Exits and the launcher's own signals arrive in one queue, in the order in which they happened.
    """

    def __init__(self, children: Sequence[Child], events: "SimpleQueue[Exit | Signals]") -> None:
        self._children = {child.name: child for child in children}
        self._events = events
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: list[Exit] = []
        self.interrupt: Signals | None = None

    def log_path(self, end: Exit) -> Path:
        return self._children[end.name].log_path

    def start(self) -> None:
        try:
            for name, child in self._children.items():
                self._processes[name] = _start(child)
        finally:
            # After the last fork: a child must not be forked from a process with threads.
            for name, process in self._processes.items():
                Thread(target=self._await_exit, args=(name, process), daemon=True).start()

    def watch(self, on_tick: Callable[[], None]) -> Outcome:
        while (outcome := decide(list(self._children.values()), self.exits, self.interrupt)) is None:
            on_tick()
            self._receive(TICK_S)
        return outcome

    def stop(self, grace_s: float) -> None:
        """SIGTERM; after the grace period, or at another signal to the launcher, SIGKILL. Workers first."""
        self.interrupt = None
        for services in (False, True):
            names = {name for name in self._processes if self._children[name].service is services}
            self._signal(names, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self._alive(names) and self.interrupt is None and (left := deadline - time.monotonic()) > 0:
                self._receive(min(left, TICK_S))
            self._signal(names, signal.SIGKILL)
            while self._alive(names):
                self._receive(None)

    def _alive(self, names: Set[str]) -> bool:
        return not names <= {end.name for end in self.exits}

    def _receive(self, timeout_s: float | None) -> None:
        """Takes an event. A signal that arrives just before the wait is seen only after it: keep it short."""
        with suppress(Empty):
            match self._events.get(timeout=timeout_s):
                case Exit() as end:
                    self.exits.append(end)
                case Signals() as interrupt:
                    self.interrupt = interrupt

    def _await_exit(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        self._events.put(Exit(name, code))

    def _signal(self, names: Set[str], number: Signals) -> None:
        for name in names:
            if self._processes[name].returncode is None:
                _signal_group(self._processes[name].pid, number)


def _start(child: Child) -> subprocess.Popen[bytes]:
    child.log_path.parent.mkdir(parents=True, exist_ok=True)
    with child.log_path.open("wb") as log:
        return subprocess.Popen(
            child.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **child.env},
            start_new_session=True,
            preexec_fn=_die_with_launcher(),
        )


def _die_with_launcher() -> Callable[[], None] | None:
    """What a child does before it becomes its program, so that a killed launcher takes it along."""
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
def _signals_into(events: "SimpleQueue[Exit | Signals]") -> Iterator[None]:
    """The launcher's own signals become events: an exception could strike in the midst of stopping."""

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
