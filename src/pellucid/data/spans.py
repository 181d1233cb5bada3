"""Spans: which process did what, from when to when; `pellucid view` and `pellucid trace` read them.

Every process of a run appends to a file of its own, `spans/PROCESS.jsonl`, and takes nothing back: time that
went into a step which a resume discards was spent all the same.

    {"name": "start", "start": 1760000000.0, "end": 1760000000.0}                   the process starts
    {"name": "wait", "start": 1760000000.5, "end": 1760000002.0, "step": 0}
    {"name": "decode", "start": …, "end": …, "step": 3, "load": 42.5}

Times are seconds since 1970. A process reads the wall clock once, at its start, and counts on with a clock
that nobody sets. A span is written after it has ended, so one that is going on is not in the file.

Readers do not trust the files: they report lines that are no spans, and leave them out.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from pellucid.data.files import append_whole, read_lines, require_own
from pellucid.errors import DataError

logger = logging.getLogger(__name__)

START = "start"
"""Name of the span without length that a process writes first, each time it starts."""

NO_STEP = -1

MAX_SPANS = 5_000_000
"""Most spans that are read of one process: one a second for eight weeks."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(max_length=256)]
    start: _Seconds
    end: _Seconds
    step: Annotated[int, msgspec.Meta(ge=NO_STEP, lt=10**15)] = NO_STEP
    """Step that the span belongs to; for engines, weights and evaluations the policy version."""

    load: Annotated[float, msgspec.Meta(ge=0, lt=1e12)] | None = None
    """Mean number of sequences decoded together, or of rollouts in flight; in a `start`, how many sequences
    fit. None where nothing is counted."""

    @property
    def duration_s(self) -> float:
        return self.end - self.start


def spans_folder(output_dir: Path) -> Path:
    return output_dir / "spans"


class SpanLog:
    """The spans of one process, appended to its file by `flush`; threads may share it.

    The file is made by the first flush that has something to write. A run does not end for want of its time
    line: if the file cannot be written, the log says so once, and nothing is recorded from then on.
    """

    def __init__(self, output_dir: Path, process: str, load: float | None = None) -> None:
        """`load`: how many sequences fit into an engine."""
        self._path = spans_folder(output_dir) / f"{process}.jsonl"
        self._offset_s = time.time() - self.clock()
        self._lock = threading.Lock()
        self._failed = False
        now = self.clock()
        self._unwritten = [Span(START, now + self._offset_s, now + self._offset_s, load=load)]

    clock = staticmethod(time.perf_counter)
    """Clock whose readings `add` takes."""

    def add(self, name: str, start: float, end: float, step: int, load: float | None = None) -> None:
        span = Span(name, start + self._offset_s, end + self._offset_s, step, load)
        with self._lock:
            self._unwritten.append(span)

    @contextmanager
    def timed(self, name: str, step: int) -> Iterator[None]:
        """Context manager: adds a span for the time spent inside."""
        started = self.clock()
        try:
            yield
        finally:
            self.add(name, started, self.clock(), step)

    def flush(self) -> None:
        with self._lock:
            spans = self._unwritten
            if not spans or spans[-1].name == START:
                return
            self._unwritten = []
            if self._failed:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                require_own(self._path)
                with self._path.open("ab", buffering=0) as file:
                    append_whole(file, b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
            except (OSError, DataError) as error:
                self._failed = True
                logger.warning("spans cannot be written: %s; the run goes on without its time line", error)


def read_spans(path: Path, report: Callable[[str], object] = logger.warning) -> list[Span]:
    """Reads the spans of one process in the order of the file; calls `report` with what cannot be read."""
    spans: list[Span] = []
    num_damaged = 0
    decoder = msgspec.json.Decoder(Span)
    try:
        for _, line in read_lines(path):
            if not line.endswith(b"\n"):
                break  # it is being written
            try:
                span = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                num_damaged += 1
                continue
            if span.end < span.start or len(spans) == MAX_SPANS:
                num_damaged += 1
            else:
                spans.append(span)
    except (DataError, OSError) as error:
        report(str(error))
    if num_damaged:
        report(f"{path}: {num_damaged:,} lines are no spans, or too many; they are left out")
    return spans
