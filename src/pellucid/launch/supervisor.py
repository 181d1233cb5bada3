"""Starts the processes of a run, and ends them together.

    start ──> watch ──┬─ a child fails, or a service leaves early ──> stop the others, ProcessError
                      ├─ every child but the services ended with 0 ─> stop the services, return
                      └─ SIGINT, SIGTERM, SIGHUP ───────────────────> stop all, SystemExit(128 + signal)

No child outlives `supervise`. Each leads a session of its own, so that Ctrl-C in the terminal reaches the
launcher alone, which then stops workers before services: winding down may need the server. A child is killed
only once it is silent for too long, or at another signal; what it says of itself comes through a pipe (see
`pellucid.ending`) and is shown. So is a child that has nothing left to do but does not exit.

What a child leaves behind in its process group goes with it. If the launcher itself is killed outright, Linux
kills the children (PR_SET_PDEATHSIG); other systems have no such call, and there they are left running.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import Signals
from threading import Thread

import msgspec

from pellucid.ending import LAUNCHER_PIPE, SILENCE_S, Word, describe_pipe
from pellucid.errors import DiskError, ProcessError
from pellucid.launch.last_words import LastWords, read_cause

TICK_S = 0.25
_READ_OUT_S = 1.0
"""For the last words of a child that has exited; something that it started may hold its pipe open."""

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
class RunEnding:
    """How a run ends; neither failed nor interrupted is a finished run."""

    failure: Exit | None = None
    interrupt: Signals | None = None


def decide(
    children: Sequence[Child], exits: Sequence[Exit], interrupt: Signals | None = None
) -> RunEnding | None:
    """Decides from the exits so far, in their order, how the run ends; None: it goes on."""
    workers = {child.name for child in children if not child.service}
    for end in exits:
        if end.code != 0 or (workers and end.name not in workers):
            return RunEnding(failure=end)
        workers.discard(end.name)
    if interrupt is not None:
        return RunEnding(interrupt=interrupt)
    return None if workers else RunEnding()


_Event = Exit | Signals | tuple[str, Word]
"""A child's exit, a signal to the launcher, or (child, its word)."""


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
            fleet.say(_announce(outcome))
            num_exits = len(fleet.exits)
        finally:
            fleet.stop()
    _raise(outcome, fleet, fleet.exits[num_exits:])


def _announce(outcome: RunEnding) -> str:
    if outcome.failure:
        return f"{outcome.failure}; stopping the others"
    if outcome.interrupt:
        return f"{outcome.interrupt.name}: stopping; once more to kill at once"
    return "all steps done; stopping the services"


def _raise(outcome: RunEnding, fleet: "_Fleet", late: Sequence[Exit]) -> None:
    """Raises the error of a run that did not finish; `late` are the exits after it was stopped."""
    if outcome.failure:
        # Who notices a failure may be quicker to end than who failed.
        late = [end for end in late if fleet.has_failed(end)]
        first, *then = sorted([outcome.failure, *late], key=fleet.known_at)
        kind = DiskError if DiskError.exit_code in {end.code for end in (first, *then)} else ProcessError
        raise kind("\n".join([fleet.explain(first), *(f"then {fleet.explain(end)}" for end in then)]))
    if interrupt := outcome.interrupt or fleet.interrupt:
        raise SystemExit(128 + interrupt)
    if late := [end for end in late if end.code not in GOOD_ENDS]:
        raise ProcessError(fleet.explain(late[0]))


class _Fleet:
    """The running children: the one place that starts, signals and reaps them.

    Exits, what children say, and the launcher's own signals arrive in one queue, in the order in which they
    happened.
    """

    def __init__(
        self,
        children: Sequence[Child],
        events: "SimpleQueue[_Event]",
        say: Callable[[str], object],
        grace_s: float,
    ) -> None:
        self._children = {child.name: child for child in children}
        self._events = events
        self._say = say
        self._words = LastWords(self._children, grace_s)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pipes: dict[str, int] = {}
        self._ended_at: dict[str, float] = {}
        self._killed: dict[str, str] = {}
        """How each killed child was killed, by name."""
        self._spared: set[str] = set()
        """Those that were killed and had nothing left to do."""
        self.exits: list[Exit] = []
        self.interrupt: Signals | None = None

    def say(self, line: str) -> None:
        """Shows a line; a terminal that is gone must not keep the children running."""
        with suppress(OSError):
            self._say(line)

    def start(self) -> None:
        try:
            for name, child in self._children.items():
                self._processes[name], self._pipes[name] = _start(child)
        finally:
            # After the last fork: a child must not be forked from a process with threads.
            for name, process in self._processes.items():
                Thread(target=self._await_exit, args=(name, process), daemon=True).start()

    def watch(self, on_tick: Callable[[], None]) -> RunEnding:
        while (outcome := decide(list(self._children.values()), self.exits, self.interrupt)) is None:
            on_tick()
            workers = self._running(services=False)
            for name in workers:
                if self._words.is_spare(name) and self._words.is_silent(name):
                    self._kill(name)
            if self.exits:
                self._show(workers)
            self._receive(TICK_S)
        return outcome

    def stop(self) -> None:
        """SIGTERM; SIGKILL for those that fall silent, or for all at another signal. Workers first."""
        self.interrupt = None
        for services in (False, True):
            names = self._running(services=services)
            for name in names:
                self._signal(name, signal.SIGTERM)
            self._words.tell_to_stop(names)
            while names := self._running(services=services):
                for name in names - self._killed.keys():
                    if self.interrupt is not None:
                        self._kill(name, f"at the second {self.interrupt.name}")
                    elif self._words.is_silent(name):
                        self._kill(name)
                self._show(names - self._killed.keys())
                self._receive(TICK_S)

    def known_at(self, end: Exit) -> float:
        """When a child knew that it fails, or else ended."""
        failure = self._words.failure(end.name)
        return self._ended_at[end.name] if failure is None else failure.at

    def has_failed(self, end: Exit) -> bool:
        """Whether a child that was stopped had failed by itself."""
        return self._words.failure(end.name) is not None or (end.code > 0 and end.code not in GOOD_ENDS)

    def explain(self, end: Exit) -> str:
        """Says how a child ended, why, and where its log is; on a full disk, by the child's own report."""
        log_path, failure = self._children[end.name].log_path, self._words.failure(end.name)
        how = self._killed.get(end.name, str(end))
        if failure and end.code in GOOD_ENDS:
            how = f"{end.name} failed"
        if failure and (end.code == DiskError.exit_code or end.code < 0):
            causes = [f"error: {failure.failed}"]
        else:
            causes = [] if end.name in self._killed else read_cause(log_path)
        lines = [line for cause in causes for line in cause.splitlines()]
        return "\n".join([how, *(f"  {line}" for line in lines), f"log: {log_path}"])

    def _running(self, *, services: bool) -> set[str]:
        ended = {end.name for end in self.exits}
        return {name for name in self._processes if self._children[name].service is services} - ended

    def _show(self, names: Set[str]) -> None:
        for line in self._words.lines(names):
            self.say(line)

    def _kill(self, name: str, when: str = "") -> None:
        if name in self._killed:
            return
        self._killed[name] = self._words.epitaph(name, when)
        if self._words.is_spare(name):
            self._spared.add(name)
        self._signal(name, signal.SIGKILL)
        self.say(self._killed[name])

    def _signal(self, name: str, number: Signals) -> None:
        if self._processes[name].returncode is None:
            _signal_group(self._processes[name].pid, number)

    def _receive(self, timeout_s: float) -> None:
        """Takes an event. A signal that arrives just before the wait is seen only after it: keep it short."""
        with suppress(Empty):
            match self._events.get(timeout=timeout_s):
                case Exit() as end:
                    self._ended_at[end.name] = time.monotonic()
                    self.exits.append(replace(end, code=0) if end.name in self._spared else end)
                case Signals() as interrupt:
                    self.interrupt = interrupt
                case (name, word):
                    self._words.hear(name, word)

    def _await_exit(self, name: str, process: subprocess.Popen[bytes]) -> None:
        reader = Thread(target=self._listen, args=(name,), daemon=True)
        reader.start()
        code = process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        reader.join(_READ_OUT_S)
        self._events.put(Exit(name, code))

    def _listen(self, name: str) -> None:
        with open(self._pipes[name], "rb") as pipe:
            for line in pipe:
                with suppress(msgspec.DecodeError):  # of somebody who writes to any descriptor it finds
                    self._events.put((name, msgspec.json.decode(line, type=Word)))


def _start(child: Child) -> tuple[subprocess.Popen[bytes], int]:
    """Returns the process, and the end of the pipe from which its words are read."""
    child.log_path.parent.mkdir(parents=True, exist_ok=True)
    words, theirs = os.pipe()
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
        os.close(words)
        raise
    finally:
        os.close(theirs)
    return process, words


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
