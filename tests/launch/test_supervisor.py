"""Real processes: however a run ends, its cause is named and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.ending import SILENCE_S
from pellucid.errors import DiskError, ProcessError
from pellucid.launch.supervisor import Child, Exit, decide, supervise

SLEEP = "import time; time.sleep(60)"
READY = "print('ready', flush=True)"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
EXIT_AT_SIGTERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({}))"


class Crew:
    """Makes children that write down their process id, and tells which of those still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def child(self, name: str, *lines: str, service: bool = False) -> Child:
        pid_file, partial = (str(self.folder / f"{name}.{suffix}") for suffix in ("pid", "partial"))
        note = f"import os; print(os.getpid(), file=open({partial!r}, 'w'), flush=True)"
        argv = (sys.executable, "-c", "\n".join([note, f"os.rename({partial!r}, {pid_file!r})", *lines]))
        return Child(name, argv, self.log_path(name), service=service)

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def until_ready(self, name: str) -> str:
        """Python code that waits for the first output of a child."""
        path = str(self.log_path(name))
        return (
            f"import time\nwhile not os.path.exists({path!r}) or not open({path!r}).read(): time.sleep(0.01)"
        )

    def pid(self, name: str) -> int:
        path = self.folder / f"{name}.pid"
        wait_until(path.exists)
        return int(path.read_text())

    def running(self) -> list[str]:
        return [path.stem for path in self.folder.glob("*.pid") if is_running(int(path.read_text()))]


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(tmp_path)


def is_running(pid: int) -> bool:
    """An orphan that is dead but that nobody has reaped yet does not count."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


CHILDREN = [Child(name, (), Path(f"{name}.log"), service=name == "server") for name in ("server", "a", "b")]


@pytest.mark.parametrize(
    ("exits", "outcome"),
    [
        ([], None),
        ([Exit("a", 0)], None),
        ([Exit("a", 0), Exit("b", 0)], "done"),
        ([Exit("a", 0), Exit("b", 0), Exit("server", 0)], "done"),
        ([Exit("a", 3)], Exit("a", 3)),
        ([Exit("a", -9), Exit("b", 1)], Exit("a", -9)),
        ([Exit("a", 0), Exit("server", 0)], Exit("server", 0)),
    ],
)
def test_what_exits_mean_for_a_run(exits, outcome):
    assert decide(CHILDREN, exits) == outcome


def test_a_signal_ends_a_run_that_has_not_failed():
    assert decide(CHILDREN, [Exit("a", 0)], Signals.SIGINT) == Signals.SIGINT
    assert decide(CHILDREN, [Exit("a", 1)], Signals.SIGINT) == Exit("a", 1)


@given(st.permutations(["server", "a", "b"]), st.tuples(*3 * [st.sampled_from([0, 0, 1, -9])]))
def test_a_cause_once_known_never_changes(names, codes):
    exits = [Exit(name, code) for name, code in zip(names, codes, strict=True)]
    outcomes = [decide(CHILDREN, exits[:num]) for num in range(4)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exit)]

    assert failures == failures[:1] * len(failures)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit("trainer", 3), "trainer exited with code 3"),
        (Exit("trainer", 74), "trainer exited with code 74 (the disk is full, or cannot be written to)"),
        (Exit("trainer", 0), "trainer exited with code 0 before the run was over"),
        (Exit("trainer", 143), "trainer exited with code 143 (SIGTERM, and not from the launcher)"),
        (Exit("trainer", 130), "trainer exited with code 130 (SIGINT, and not from the launcher)"),
        (Exit("trainer", -11), "trainer was killed by SIGSEGV"),
        (Exit("trainer", -9), "trainer was killed by SIGKILL (the kernel does that when memory runs out)"),
    ],
)
def test_an_exit_in_words(end, text):
    assert str(end) == text


def test_a_run_is_done_when_its_workers_are_and_then_its_services_are_stopped(crew):
    said: list[str] = []
    ticks: list[None] = []
    server = crew.child("server", EXIT_AT_SIGTERM.format(0), READY, SLEEP, service=True)
    worker = crew.child("worker", crew.until_ready("server"), "time.sleep(0.3); print('done')")

    supervise([server, worker], on_tick=lambda: ticks.append(None), say=said.append)

    assert said == ["all steps done; stopping the services"]
    assert len(ticks) >= 2
    assert worker.log_path.read_text() == "done\n"
    assert crew.running() == []


def test_a_service_may_end_by_the_signal_that_stops_it(crew):
    server = crew.child("server", READY, SLEEP, service=True)

    supervise([server, crew.child("worker", crew.until_ready("server"))])

    assert crew.running() == []


def test_a_child_sees_its_own_environment_on_top_of_the_launchers(crew, monkeypatch):
    monkeypatch.setenv("INHERITED", "yes")
    log_path = crew.folder / "child.log"
    code = "import os; print(os.environ['INHERITED'], os.environ['OWN'])"

    supervise([Child("child", (sys.executable, "-c", code), log_path, {"OWN": "1"})])

    assert log_path.read_text() == "yes 1\n"


def test_the_first_failure_is_explained_by_its_log_and_ends_the_others(crew):
    server = crew.child("server", READY, SLEEP, service=True)
    orchestrator = crew.child("orchestrator", READY, SLEEP)
    trainer = crew.child(
        "trainer",
        crew.until_ready("server"),
        crew.until_ready("orchestrator"),
        "print('error: lr = 0 is too low; raise it')",
        "raise SystemExit(3)",
    )

    with pytest.raises(ProcessError) as failure:
        supervise([server, orchestrator, trainer])

    assert str(failure.value) == (
        f"trainer exited with code 3\n  error: lr = 0 is too low; raise it\nlog: {trainer.log_path}"
    )
    assert crew.running() == []


def test_what_fails_after_the_first_is_explained_too(crew):
    """Who notices a failure may be quicker to end than who failed."""
    second = crew.child("second", EXIT_AT_SIGTERM.format(7), "print('error: no memory')", READY, SLEEP)
    first = crew.child("first", crew.until_ready("second"), "raise SystemExit(1)")

    with pytest.raises(ProcessError) as failure:
        supervise([second, first])

    lines = str(failure.value).splitlines()
    assert lines[0] == "first exited with code 1"
    assert lines[-3:] == ["then second exited with code 7", "  error: no memory", f"log: {second.log_path}"]


@pytest.mark.parametrize("code", [130, 143])
def test_a_child_may_exit_with_the_signal_that_stops_it(crew, code):
    server = crew.child("server", EXIT_AT_SIGTERM.format(code), READY, SLEEP, service=True)
    supervise([server, crew.child("worker", crew.until_ready("server"))])

    second = crew.child("second", EXIT_AT_SIGTERM.format(code), READY, SLEEP)
    first = crew.child("first", crew.until_ready("second"), "raise SystemExit(1)")
    with pytest.raises(ProcessError) as failure:
        supervise([second, first])

    assert str(failure.value).splitlines() == ["first exited with code 1", f"log: {first.log_path}"]


def test_a_worker_that_someone_else_stops_ends_the_run(crew):
    trainer = crew.child("trainer", READY, SLEEP)
    orchestrator = crew.child(
        "orchestrator", EXIT_AT_SIGTERM.format(143), crew.until_ready("trainer"), "os.kill(os.getpid(), 15)"
    )

    with pytest.raises(ProcessError, match=r"^orchestrator exited with code 143 \(SIGTERM, and not from"):
        supervise([trainer, orchestrator])

    assert crew.running() == []


def at_sigterm(*lines):
    """Python code that runs `lines` when told to stop, and exits."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"import signal, time\ndef stop(*_):\n{body}\n    raise SystemExit(0)\nsignal.signal(15, stop)"


def test_services_are_stopped_once_the_workers_are_gone(crew):
    now = "print(time.monotonic(), flush=True)"
    server = crew.child("server", at_sigterm(now), READY, SLEEP, service=True)
    worker = crew.child("worker", at_sigterm("time.sleep(0.3)", now), READY, SLEEP)
    failing = crew.child(
        "failing", crew.until_ready("server"), crew.until_ready("worker"), "raise SystemExit(1)"
    )

    with pytest.raises(ProcessError, match=r"^failing exited with code 1"):
        supervise([server, worker, failing])

    stopped = {child.name: float(child.log_path.read_text().split()[1]) for child in (server, worker)}
    assert stopped["worker"] < stopped["server"]
    assert crew.running() == []


def test_services_are_stopped_even_if_a_worker_will_not_stop(crew):
    server = crew.child("server", at_sigterm("print('closed', flush=True)"), READY, SLEEP, service=True)
    stubborn = crew.child("stubborn", IGNORE_SIGTERM, READY, SLEEP)
    failing = crew.child(
        "failing", crew.until_ready("server"), crew.until_ready("stubborn"), "raise SystemExit(1)"
    )

    with pytest.raises(ProcessError, match=r"^failing exited with code 1"):
        supervise([server, stubborn, failing], grace_s=0.3)

    assert server.log_path.read_text().split() == ["ready", "closed"]
    assert crew.running() == []


def test_a_child_that_is_killed_ends_the_run(crew):
    orchestrator = crew.child("orchestrator", READY, SLEEP)
    trainer = crew.child("trainer", crew.until_ready("orchestrator"), "os.kill(os.getpid(), 9)")

    with pytest.raises(ProcessError, match=r"^trainer was killed by SIGKILL"):
        supervise([orchestrator, trainer])

    assert crew.running() == []


def test_a_service_that_leaves_early_ends_the_run(crew):
    trainer = crew.child("trainer", READY, SLEEP)
    server = crew.child("server", crew.until_ready("trainer"), service=True)

    with pytest.raises(ProcessError, match=r"^server exited with code 0 before the run was over"):
        supervise([trainer, server])

    assert crew.running() == []


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(crew):
    stubborn = crew.child("stubborn", IGNORE_SIGTERM, READY, SLEEP)
    trainer = crew.child("trainer", crew.until_ready("stubborn"), "raise SystemExit(1)")

    with pytest.raises(ProcessError, match=r"^trainer exited with code 1"):
        supervise([stubborn, trainer], grace_s=0.3)

    assert crew.running() == []


def test_a_service_that_will_not_stop_fails_a_finished_run(crew):
    server = crew.child("server", IGNORE_SIGTERM, READY, SLEEP, service=True)

    with pytest.raises(ProcessError) as failure:
        supervise([server, crew.child("trainer", crew.until_ready("server"))], grace_s=0.3)

    assert str(failure.value) == (
        f"server was killed after 0.3 s of silence; it had not said what it was doing\nlog: {server.log_path}"
    )
    assert crew.running() == []


SAY = "from pellucid.ending import PellucidError, say, say_failure"
"""A line of Python; children that speak import nothing else of ours."""


def speaks(doing: str, at_stake: str = "", silence_s: float = 60.0) -> str:
    return f"say({doing!r}, at_stake={at_stake!r}, silence_s={silence_s})"


def test_a_child_that_says_what_it_does_is_waited_for_and_shown(crew):
    said: list[str] = []
    stop = at_sigterm(speaks("writing a checkpoint", "it"), "time.sleep(1.5)", "print('written')")
    trainer = crew.child("trainer", SAY, stop, READY, SLEEP)
    failing = crew.child("failing", crew.until_ready("trainer"), "raise SystemExit(1)")

    with pytest.raises(ProcessError, match=r"^failing exited with code 1\nlog: "):
        supervise([trainer, failing], say=said.append, grace_s=0.3)

    assert trainer.log_path.read_text().split() == ["ready", "written"]
    assert said == ["failing exited with code 1; stopping the others", "trainer: writing a checkpoint"]


def test_a_child_that_falls_silent_is_killed_with_what_it_said_last(crew):
    said: list[str] = []
    stop = at_sigterm(speaks("writing a checkpoint", "the steps since 30", 0.3), "time.sleep(60)")
    server = crew.child("server", SAY, stop, READY, SLEEP, service=True)

    with pytest.raises(ProcessError) as failure:
        supervise([server, crew.child("trainer", crew.until_ready("server"))], say=said.append)

    epitaph = (
        "server was killed after 0.3 s of silence while writing a checkpoint; lost may be the steps since 30"
    )
    assert str(failure.value) == f"{epitaph}\nlog: {server.log_path}"
    assert said == ["all steps done; stopping the services", epitaph]
    assert crew.running() == []


@pytest.mark.parametrize("service", [False, True])
def test_a_child_that_only_does_not_exit_fails_no_run(crew, service):
    """A worker that is done is not waited for either: it is never told to stop."""
    said: list[str] = []
    hangs = [SAY, speaks("exiting", silence_s=0.3), IGNORE_SIGTERM, READY, SLEEP]
    done = crew.child("done", *hangs, service=service)

    supervise([done, crew.child("worker", crew.until_ready("done"))], say=said.append)

    assert "done was killed after 0.3 s of silence while exiting; nothing is lost" in said
    assert said.count("all steps done; stopping the services") == 1
    assert crew.running() == []


def test_the_cause_is_who_knew_first_that_it_fails(crew):
    """On a full disk the engine cannot keep its books; the orchestrator, left without one, ends sooner."""
    engine = crew.child(
        "engine",
        SAY,
        "say_failure(PellucidError('the disk is full'))",
        EXIT_AT_SIGTERM.format(74),
        READY,
        SLEEP,
        service=True,
    )
    orchestrator = crew.child(
        "orchestrator",
        SAY,
        crew.until_ready("engine"),
        "print('error: no weights could be served')",
        "say_failure(PellucidError('no weights could be served'))",
        "raise SystemExit(1)",
    )

    with pytest.raises(DiskError) as failure:
        supervise([engine, orchestrator])

    assert str(failure.value).splitlines() == [
        "engine exited with code 74 (the disk is full, or cannot be written to)",
        "  error: the disk is full",
        f"log: {engine.log_path}",
        "then orchestrator exited with code 1",
        "  error: no weights could be served",
        f"log: {orchestrator.log_path}",
    ]


def test_a_failure_counts_though_its_process_ends_by_our_signal(crew):
    engine = crew.child(
        "engine", SAY, "say_failure(PellucidError('out of memory'))", READY, SLEEP, service=True
    )
    orchestrator = crew.child("orchestrator", crew.until_ready("engine"), "raise SystemExit(1)")

    with pytest.raises(ProcessError) as failure:
        supervise([engine, orchestrator])

    assert str(failure.value).splitlines()[:2] == ["engine failed", "  error: out of memory"]


def test_a_terminal_that_is_gone_leaves_nobody_running(crew):
    def fail(line: str) -> None:
        raise OSError(5, "Input/output error")

    server = crew.child("server", READY, SLEEP, service=True)
    with pytest.raises(ProcessError, match=r"^worker exited with code 1"):
        supervise([server, crew.child("worker", crew.until_ready("server"), "raise SystemExit(1)")], say=fail)

    assert crew.running() == []


def test_what_a_child_leaves_behind_goes_with_it(crew):
    grandchild = crew.child("grandchild", READY, SLEEP)
    parent = crew.child(
        "parent",
        f"import subprocess; orphan = subprocess.Popen({grandchild.argv!r}, stdout=subprocess.PIPE)",
        "orphan.stdout.readline()",
    )

    supervise([parent])

    wait_until(lambda: crew.running() == [])


def test_an_error_while_watching_leaves_nothing_behind(crew):
    def fail() -> None:
        crew.pid("trainer")
        raise RuntimeError("the view broke")

    with pytest.raises(RuntimeError, match="the view broke"):
        supervise([crew.child("trainer", SLEEP)], on_tick=fail)

    assert crew.running() == []


def test_a_program_that_does_not_exist_leaves_nothing_behind(crew):
    missing = Child("missing", ("/does/not/exist",), crew.folder / "missing.log")

    with pytest.raises(FileNotFoundError):
        supervise([crew.child("trainer", SLEEP), missing])

    assert crew.running() == []


LAUNCHER = """
import signal, sys
from pathlib import Path
from pellucid.launch.supervisor import Child, supervise

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
folder, *programs = sys.argv[1:]
supervise(
    [
        Child(f"child{number}", (sys.executable, "-c", program), Path(folder) / f"child{number}.log")
        for number, program in enumerate(programs)
    ],
    say=lambda line: print(line, flush=True),
)
"""


@contextmanager
def launched(crew: Crew, *children: Child) -> Iterator["subprocess.Popen[str]"]:
    """A launcher in a process of its own, all of whose children are ready."""
    programs = [child.argv[2] for child in children]
    logs = [crew.folder / f"child{number}.log" for number in range(len(programs))]
    argv = [sys.executable, "-c", LAUNCHER, str(crew.folder), *programs]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: all(log.exists() and log.read_text() for log in logs))
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_stops_everything(crew, number, code):
    with launched(crew, crew.child("one", READY, SLEEP), crew.child("two", READY, SLEEP)) as launcher:
        launcher.send_signal(number)
        said, _ = launcher.communicate(timeout=9)

    assert launcher.returncode == code
    assert said == f"{number.name}: stopping; once more to kill at once\n"
    assert crew.running() == []


def test_a_second_signal_does_not_wait_for_the_grace_period(crew):
    with launched(crew, crew.child("stubborn", IGNORE_SIGTERM, READY, SLEEP)) as launcher:
        launcher.send_signal(signal.SIGINT)
        launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=SILENCE_S / 2)

    assert launcher.returncode == 130
    assert crew.running() == []


def test_a_second_signal_kills_one_that_is_waited_for(crew):
    stop = at_sigterm(speaks("writing a checkpoint", "it", 600.0), "time.sleep(600)")
    with launched(crew, crew.child("trainer", SAY, stop, READY, SLEEP)) as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "SIGINT: stopping; once more to kill at once\n"
        assert launcher.stdout.readline() == "child0: writing a checkpoint\n"
        launcher.send_signal(signal.SIGINT)
        said, _ = launcher.communicate(timeout=SILENCE_S)

    assert said == "child0 was killed at the second SIGINT while writing a checkpoint; lost may be it\n"
    assert launcher.returncode == 130
    assert crew.running() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_children_die_with_a_killed_launcher(crew):
    with launched(crew, crew.child("one", READY, SLEEP), crew.child("two", READY, SLEEP)) as launcher:
        launcher.kill()

    wait_until(lambda: crew.running() == [])
