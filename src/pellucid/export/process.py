"""A step's records encoded and written by a process beside the one that trains.

Python's lock is not shared with training then: a thread would hold it while it makes JSON of a long record,
and training could start no operation meanwhile.

    training                                this process
    ("write", step, batch)    ────────>     StepWriter.write
                              <────────     None, or the error that it ended with

It ends when the other end of its pipe does, however that came about: what it had of a step keeps its hidden
name.
"""

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from pellucid.export.batch import ColumnBatch
from pellucid.export.step_writer import StepWriter

_GRACE_S = 10.0


class WriterProcess:
    """A writer that runs `writer` in another process, which starts with the first call."""

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def write(self, step: int, batch: ColumnBatch) -> None:
        self._call("write", step, batch)

    def complete(self, step: int) -> None:
        self._call("complete", step)

    def abandon(self) -> None:
        """Ends the process."""
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None

    def _call(self, name: str, *arguments: object) -> None:
        try:
            pipe = self._pipe or self._start()
            pipe.send((name, *arguments))
            error = pipe.recv()
        except (EOFError, ConnectionError) as broken:
            raise OSError(f"its process is gone ({self._how_it_ended()})") from broken
        if error is not None:
            raise error

    def _start(self) -> Connection:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._pipe.send(self._writer)
        return self._pipe

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it did not start"
        try:
            return f"exit code {self._process.wait(_GRACE_S)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipe"


def serve(pipe: Connection) -> None:
    """Handles calls until the other end of the pipe is closed."""
    try:
        writer: StepWriter = pipe.recv()
        while True:
            name, *arguments = pipe.recv()
            pipe.send(_attempt(getattr(writer, name), arguments))
    except (EOFError, ConnectionError):
        return


def _attempt(work: Any, arguments: list[Any]) -> Exception | None:
    try:
        work(*arguments)
    except Exception as error:  # all of them are raised where the call was made
        return error
    return None


def main() -> None:
    # Whoever ends a run signals all its processes; the trainer may finish its step, and this ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as pipe:
        serve(pipe)
