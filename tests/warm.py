"""Starts `python -m pellucid.cli` without the seconds that its imports take.

    tests ──socket──> warm Python ──fork──> waiter ──fork──> pellucid rl ──fork──> trainer, inference, …

The first start makes a Python that imports all parts and computes nothing. A command is a fork of it that
goes on as `python -m pellucid.cli` would, and so are the processes which that command starts. They have
parents, process groups, signals, files and exit codes like any others; what differs is that their modules
are there already. `test_end_to_end.py` starts a run for real, too.

Where the system is not Linux, every command is started for real.
"""

import atexit
import ctypes
import gc
import io
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module, invalidate_caches
from itertools import pairwise
from pathlib import Path
from typing import Any, Never

PYTHON = (sys.executable, "-m")
PARTS = ("cli", "launch", "launch.sft", "trainer", "orchestrator", "inference.server", "inference.http")
MODELS = ("AutoTokenizer", "AutoModelForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
MAX_REQUEST_BYTES = 1 << 17


class Running:
    """A command that was started; as much of `subprocess.Popen` as tests need."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path | None,
        env: Mapping[str, str],
        merged: bool,
        imported: tuple[str, ...],
        namespaces: Path,
    ) -> None:
        num_files = 1 if merged else 2
        self._files = [tempfile.TemporaryFile("w+") for _ in range(num_files)]  # noqa: SIM115
        self._waiter, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"argv": list(argv), "cwd": str(cwd or Path.cwd()), "env": dict(env)}).encode()
        assert len(request) < MAX_REQUEST_BYTES
        with theirs, open(namespaces / "mnt") as mounts, open(namespaces / "net") as network:
            given = (theirs, mounts, network, self._files[0], self._files[-1])
            socket.send_fds(_warm_python(imported), [request], [each.fileno() for each in given])
        self.pid = self._read()
        self.returncode: int | None = None
        self._written = ["", ""]

    def poll(self) -> int | None:
        with suppress(BlockingIOError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._waiter.settimeout(timeout)
            self.returncode = self._read()
            self._waiter.close()
            for number, file in enumerate(self._files):
                with file:
                    file.seek(0)
                    self._written[number] = file.read()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns standard output and error, which is empty if it was merged."""
        self.wait(timeout)
        return self._written[0], self._written[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self) -> int:
        """The next number that the waiter sends: the process's id, and in the end its exit code."""
        answer = self._waiter.recv(64)
        assert answer, "the waiter is gone"
        return int(answer)


def start(
    arguments: Sequence[str],
    *,
    module: str = "pellucid.cli",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
    imported: tuple[str, ...] = (),
    namespaces: Path = Path("/proc/self/ns"),
) -> "Running | subprocess.Popen[str]":
    """Starts `python -m module arguments…`; `merged` writes standard error to standard output.

    The warm Python has imported the modules `imported` and no others; without any, all parts of pellucid.
    `namespaces`: those of mounts and network that the command is started in, on Linux.
    """
    argv, env = [*PYTHON, module, *arguments], os.environ if env is None else env
    if sys.platform == "linux":
        return Running(argv, cwd, env, merged, imported, namespaces)
    err = subprocess.STDOUT if merged else subprocess.PIPE
    return subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=err, text=True)


def run(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Starts a command, waits for its end, and returns its exit code and output."""
    command = start(arguments, **options)
    try:
        out, err = command.communicate()
    finally:
        command.kill()
    return subprocess.CompletedProcess(list(arguments), command.wait(), out, err)


def processes_of(folder: Path) -> dict[str, int]:
    """The processes of the run in `folder`, by name: who leads a session and writes into a log of the run."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True).stdout
        pattern = rf"^ *(\d+) .*pellucid\.cli \w+ @ {re.escape(str(folder))}/configs/(\w+)\.toml$"
        return {name: int(pid) for pid, name in re.findall(pattern, listed, re.MULTILINE)}
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            log = Path(os.readlink(entry / "fd" / "1"))
            if log.parent == folder / "logs" and os.getsid(int(entry.name)) == int(entry.name):
                found[log.stem] = int(entry.name)
    return found


def wait_for_step(run: "Running | subprocess.Popen[str]", folder: Path, step: int) -> None:
    """Waits until the trainer of `run` has logged `step` or a later one.

    A run that was killed may have logged such a step before: then one more is waited for. The launcher
    rewinds the folder before it starts a trainer.
    """

    def newest() -> int:
        records = read_metrics(folder / "metrics" / "trainer.jsonl")
        return max((int(record["step"]) for record in records), default=-1)

    from pellucid.metrics import read_metrics

    wanted = None
    while wanted is None or newest() < wanted:
        assert run.poll() is None, run.communicate()[0]
        if wanted is None and "trainer" in processes_of(folder):
            wanted = max(step, newest() + 1)
        time.sleep(0.02)


def share_cores() -> int:
    """Makes `pellucid.workers.num_cores` see one core, or two for `make test-everywhere`; returns how many.

    Two workers of the suite share two. Threads of one process spin while they wait for each other; on cores
    that others want as well, a run took four times the CPU time.
    """
    num_cores = int(os.environ.get("PELLUCID_TEST_THREADS", "1"))
    os.cpu_count = lambda: num_cores
    if sys.platform == "linux":
        os.sched_getaffinity = lambda pid: set(range(num_cores))
    return num_cores


@cache
def _warm_python(imported: tuple[str, ...]) -> socket.socket:
    """Starts the one that forks; it ends with this process, which holds the other end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imported],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # called first: that ends it
    return ours


# In the warm Python and its forks


def serve(control: socket.socket, imported: Sequence[str]) -> None:
    share_cores()
    gc.disable()
    for module in imported or [f"pellucid.{part}" for part in PARTS]:
        import_module(module)
    for name in MODELS:
        getattr(import_module("transformers"), name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a waiter ended
    while True:
        request, descriptors, *_ = socket.recv_fds(control, MAX_REQUEST_BYTES, 5)
        if not request:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wait_for(json.loads(request), *descriptors)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def enter(namespace: int, kind: str) -> None:
    if os.fstat(namespace).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
        assert ctypes.CDLL(None).setns(namespace, 0) == 0


def wait_for(request: dict[str, Any], tell: int, mounts: int, network: int, out: int, err: int) -> None:
    enter(mounts, "mnt")  # disks that the test has mounted since
    process = ForkedPopen(
        request["argv"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        cwd=request["cwd"],
        env=request["env"],
        preexec_fn=partial(enter, network, "net"),
    )
    with socket.socket(fileno=tell) as teller, suppress(BrokenPipeError):  # if the test is over
        teller.send(str(process.pid).encode())
        teller.send(str(process.wait()).encode())


class ForkedPopen(subprocess.Popen[bytes]):
    """Forks, where the program is a module of this Python; another is started as ever.

    A fork has the thread alone that made it. A process with others starts everything as ever.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        preexec_fn: Callable[[], object] | None = None,
        pass_fds: Collection[int] = (),
        **options: Any,
    ) -> None:
        def become() -> None:
            if preexec_fn is not None:
                preexec_fn()
            become_python(args[2], args[3:], env or os.environ, pass_fds)

        is_ours = tuple(args[:2]) == PYTHON and threading.active_count() == 1
        own = become if is_ours else preexec_fn
        super().__init__(args, env=env, preexec_fn=own, pass_fds=pass_fds, **options)


def become_python(
    module: str, arguments: Sequence[str], env: Mapping[str, str], kept: Collection[int] = ()
) -> Never:
    """Goes on, after a fork, as `python -m module` that was just started; returns to nobody."""
    code = 1
    try:
        gc.collect()  # what would close a descriptor later, when it is another's
        _take_signals()  # before the parent, which waits for a descriptor to close, may send one
        bounds = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
        for last, following in pairwise(bounds):
            os.closerange(last + 1, following)
        _take_environment(dict(env))
        _take_streams()
        subprocess.Popen = ForkedPopen  # type: ignore[misc]
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _take_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    own = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*own, *(path for path in sys.path[1:] if path not in own)]
    invalidate_caches()


def _take_signals() -> None:
    """What is handled is handled no more, as after an exec; then what Python sets when it starts."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _take_streams() -> None:
    """`sys.__stdout__` keeps the parent's, whose buffer may hold what is the parent's to write."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)):
        usual = getattr(sys, f"__{name}__")
        file = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            file,
            usual.encoding,
            usual.errors,
            line_buffering=name == "stderr" and not is_unbuffered,
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
