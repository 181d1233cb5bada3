"""Live progress: one row per step, from a table of columns; and the files that the rows are read from.

On a terminal the latest rows and a progress bar are redrawn in place; elsewhere every row is a plain
line, because a live display writes nothing until its end when there is no terminal. Both are views:
they are shown records, and know nothing about where those come from.
"""

import time
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pellucid.data.alarms import Alarm, alarms_path, as_alarm
from pellucid.data.files import read_lines
from pellucid.errors import printable

T = TypeVar("T")

Record = Mapping[str, Any]
"""One line of a metrics file: `{"step": 3, "loss": 0.1, …}`."""

WIDTH = 100
"""Columns that everything printed fits in."""

LINES_PER_HEADER = 25
NUM_LIVE_ROWS = 12
STOPPED = "stopped; go on with the same command and --resume"
RATE_WINDOW_S = 600.0
STATUS_EVERY_S = 20.0
"""Seconds without a step after which a plain view tells the status, and until it does so again."""


@dataclass(frozen=True, slots=True)
class StepColumn:
    """`StepColumn("loss", "loss", 9, "{:.4f}")` shows a record's `loss` as `   0.1234`."""

    title: str
    key: str
    width: int
    template: str

    def cell(self, record: Record) -> str:
        """`-` for a value that the record does not have, `nan` for one that JSON could not hold."""
        if self.key not in record:
            return "-"
        value = record[self.key]
        return "nan" if value is None else self.template.format(value)


RL_COLUMNS = (
    StepColumn("step", "step", 6, "{:d}"),
    StepColumn("reward", "reward/all", 8, "{:.4f}"),
    StepColumn("loss", "loss", 10, "{:.4f}"),
    StepColumn("entropy", "entropy/all/mean", 8, "{:.4f}"),
    StepColumn("mismatch KL", "mismatch_kl/all/mean", 11, "{:.2e}"),
    StepColumn("tokens", "tokens", 9, "{:,.0f}"),
    StepColumn("tokens/s", "throughput/tokens_per_s", 10, "{:,.0f}"),
    StepColumn("off-policy", "off_policy_level/all/mean", 10, "{:.2f}"),
    StepColumn("time", "time/step_s", 9, "{:.2f} s"),
)

TEACHER_COLUMN = StepColumn("teacher KL", "teacher_kl/all", 10, "{:.4f}")

SFT_COLUMNS = (
    StepColumn("step", "step", 6, "{:d}"),
    StepColumn("loss", "loss", 10, "{:.4f}"),
    StepColumn("entropy", "entropy/all/mean", 8, "{:.4f}"),
    StepColumn("grad norm", "grad_norm", 9, "{:.3g}"),
    StepColumn("lr", "lr", 9, "{:.2e}"),
    StepColumn("tokens", "tokens", 9, "{:,.0f}"),
    StepColumn("tokens/s", "throughput/tokens_per_s", 10, "{:,.0f}"),
    StepColumn("time", "time/step_s", 9, "{:.2f} s"),
)

VALIDATED_SFT_COLUMNS = (
    *SFT_COLUMNS[:2],
    StepColumn("val. loss", "validation/loss", 9, "{:.4f}"),
    *SFT_COLUMNS[2:],
)


def step_cells(record: Record, columns: Sequence[StepColumn]) -> list[str]:
    return [column.cell(record) for column in columns]


def step_row(record: Record, columns: Sequence[StepColumn]) -> str:
    return _align(step_cells(record, columns), columns)


def header_row(columns: Sequence[StepColumn]) -> str:
    return _align([column.title for column in columns], columns)


def _align(cells: Sequence[str], columns: Sequence[StepColumn]) -> str:
    return "  ".join(cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True))


def skip_note(record: Record) -> str | None:
    """Returns a line for a step that moved no weights."""
    if not record.get("skipped_steps"):
        return None
    cause = "its loss or gradient is not finite; the trainer's log has the cause"
    return f"step {record['step']} is skipped: {cause}"


class PlainView:
    """A line per step, with a header now and then; the status only while no step comes."""

    def __init__(
        self,
        columns: Sequence[StepColumn],
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._columns = columns
        self._write = write
        self._clock = clock
        self._num_rows = 0
        self._last_line = clock()
        self._status: Sequence[str] = ()

    def show(self, record: Record) -> None:
        self._last_line = self._clock()
        if self._num_rows % LINES_PER_HEADER == 0:
            self._write(header_row(self._columns))
        self._write(step_row(record, self._columns))
        self._num_rows += 1
        if (note := skip_note(record)) is not None:
            self.note(note)

    def note(self, line: str) -> None:
        """Shows a line between two steps."""
        self._write(line)

    def status(self, lines: Sequence[str]) -> None:
        """Shows what happens until the next step; later lines replace these."""
        if lines and lines != self._status and self._clock() - self._last_line >= STATUS_EVERY_S:
            self._last_line = self._clock()
            self._status = lines
            for line in lines:
                self._write(line)

    def refresh(self) -> None:
        """Called a few times a second, whether or not there is a new step; lines need no redrawing."""

    def close(self) -> None:
        """Does nothing: whoever opened the stream closes it."""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{1 / task.speed:.2f} s/step" if task.speed else "- s/step")


class LiveView:
    """The latest steps as a table, above a progress bar with rate and time left."""

    def __init__(self, columns: Sequence[StepColumn], max_steps: int, console: Console) -> None:
        self._columns = columns
        self._latest: deque[Record] = deque(maxlen=NUM_LIVE_ROWS)
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            speed_estimate_period=RATE_WINDOW_S,
        )
        self._task = self._progress.add_task("", total=max_steps)
        self._status: Sequence[str] = ()
        # Refreshed by its owner: a thread of its own would be forked into the children.
        self._live = Live(self._render(), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def show(self, record: Record) -> None:
        self._latest.append(record)
        self._progress.advance(self._task)
        if (note := skip_note(record)) is not None:
            self.note(note)

    def note(self, line: str) -> None:
        """Stays, above what is redrawn."""
        self._live.console.out(line, highlight=False)

    def status(self, lines: Sequence[str]) -> None:
        self._status = lines

    def refresh(self) -> None:
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        self.refresh()
        self._live.stop()

    def _render(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD)
        for column in self._columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for record in self._latest:
            table.add_row(*step_cells(record, self._columns))
        status = Text("\n".join(self._status), style="dim")
        return Group(table, self._progress.get_renderable(), status)


StepView = PlainView | LiveView


class PlainConsole(Console):
    """A console on which only rich's own styles have control characters; those in a text are spelled out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment


def make_console(width: int | None = None) -> Console:
    """Standard output: `width` columns wide; by default as the terminal, or `WIDTH` where there is none.

    Everything that is printed may hold a name, a path or a text of the user's, so `[…]` and `:…:` stand for
    themselves: styles are given as `Text` or in columns, never as markup.
    """
    console = PlainConsole(width=width, markup=False, emoji=False)
    if width is None and not has_terminal(console):
        return make_console(WIDTH)
    return console


def has_terminal(console: Console) -> bool:
    """Whether output can be redrawn; FORCE_COLOR makes rich say so of a pipe."""
    return console.file.isatty() and not console.is_dumb_terminal


def open_view(columns: Sequence[StepColumn], max_steps: int, console: Console) -> StepView:
    if has_terminal(console):
        return LiveView(columns, max_steps, console)
    return PlainView(columns, console.out)


def number_in(record: Record, name: str) -> float | None:
    """Returns a number of a record; None if it is missing, was not finite, or is no number."""
    value = record.get(name)
    return value if isinstance(value, int | float) else None


class JsonlFollower(Generic[T]):
    """The lines added to a JSONL file since the last look; a line is read once, when it is complete."""

    def __init__(self, path: Path, parse: Callable[[str, bytes], T]) -> None:
        """`parse` is called with the place of a line, `FILE:NUMBER`, and the line."""
        self._path = path
        self._parse = parse
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[T]:
        found = []
        for _, line in read_lines(self._path, self._offset):
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._num_lines += 1
            found.append(self._parse(f"{self._path}:{self._num_lines}", line))
        return found


class AlarmFollower:
    """The alarms that ring after it was made; a line that is no alarm is left out."""

    def __init__(self, output_dir: Path) -> None:
        """Raises DataError where the file is none: a process that rings would wait for a pipe."""
        self._follower = JsonlFollower(alarms_path(output_dir), lambda _, line: as_alarm(line))
        self._follower.read()  # those of the run that is resumed

    def read(self) -> list[Alarm]:
        return [alarm for alarm in self._follower.read() if alarm is not None]


class StepJoin:
    """Merges the records of several sources by step; where two report the same key, the later source wins.

    join = StepJoin(num_sources=2)
    join.add(0, [{"step": 1, "reward/all": 0.5}])
    join.complete()                                -> []
    join.add(1, [{"step": 1, "loss": 0.1}])
    join.complete()                                -> [{"step": 1, "reward/all": 0.5, "loss": 0.1}]
    """

    def __init__(self, num_sources: int) -> None:
        self._num_sources = num_sources
        self._waiting: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, source: int, records: Iterable[Record]) -> None:
        for record in records:
            self._waiting.setdefault(record["step"], {}).setdefault(source, {}).update(record)

    def complete(self) -> list[Record]:
        """Returns the steps that every source has reported, in order; each is handed out once."""
        steps = sorted(step for step, parts in self._waiting.items() if len(parts) == self._num_sources)
        found = [self._waiting.pop(step) for step in steps]
        return [ChainMap(*(parts[source] for source in sorted(parts, reverse=True))) for parts in found]
