"""The console of a run: a row per step while it runs, and a summary on one screen at its end.

On a terminal the latest rows and a progress bar are redrawn in place. Elsewhere every row is a plain line,
because a live display writes nothing until its end when there is no terminal. Followers read the rows from
the files that the processes write.
"""

import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
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

from pellucid.data.alarms import Alarm, alarms_path, as_alarm, read_alarms
from pellucid.data.files import read_lines
from pellucid.errors import printable
from pellucid.ledger import Flow, State
from pellucid.ledger import Report as LedgerReport
from pellucid.metrics.evaluation import average_in, evaluations_in
from pellucid.transport.spool import stable_steps

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

_VALIDATION_COLUMN = StepColumn("val. loss", "validation/loss", 9, "{:.4f}")
VALIDATED_SFT_COLUMNS = (*SFT_COLUMNS[:2], _VALIDATION_COLUMN, *SFT_COLUMNS[2:])


def step_row(record: Record, columns: Sequence[StepColumn]) -> str:
    return "  ".join(column.cell(record).rjust(column.width) for column in columns)


def header_row(columns: Sequence[StepColumn]) -> str:
    return "  ".join(column.title.rjust(column.width) for column in columns)


def skip_note(record: Record) -> list[str]:
    """Returns a line for a step that moved no weights."""
    if not record.get("skipped_steps"):
        return []
    cause = "its loss or gradient is not finite; the trainer's log has the cause"
    return [f"step {record['step']} is skipped: {cause}"]


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
        for note in skip_note(record):
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
        """Does nothing: lines need no redrawing."""

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
        for note in skip_note(record):
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
            table.add_row(*(column.cell(record) for column in self._columns))
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
    join.add(0, [{"step": 1, "reward/all": 0.5}])  -> []
    join.add(1, [{"step": 1, "loss": 0.1}])        -> [{"step": 1, "reward/all": 0.5, "loss": 0.1}]
    """

    def __init__(self, num_sources: int) -> None:
        self._num_sources = num_sources
        self._waiting: dict[int, dict[int, Record]] = {}

    def add(self, source: int, records: Iterable[Record]) -> list[Record]:
        """Returns the steps that every source has now reported, in order; each is handed out once."""
        for record in records:
            self._waiting.setdefault(record["step"], {})[source] = record
        steps = sorted(step for step, parts in self._waiting.items() if len(parts) == self._num_sources)
        found = [sorted(self._waiting.pop(step).items()) for step in steps]
        return [{key: value for _, part in parts for key, value in part.items()} for parts in found]


CURVE_HEIGHT = 6
NUM_AVERAGED = 10
EIGHTHS = " ▁▂▃▄▅▆▇█"

Fact = tuple[str, str]
"""(label, text): a line of the summary."""


def curve(values: Sequence[float], width: int, height: int) -> str:
    """`values` from left to right as bars, at most `width` characters wide and `height` lines high.

    curve([0, 1, 2, 4], width=8, height=2)

        4 ┤  ▁█
        0 ┤▁▅██

    The lowest value is one eighth of a line high. Values that do not fit side by side are averaged, on
    the same scale.
    """
    if not values:
        return ""
    least, most = min(values), max(values)
    high, low = f"{most:.3g}", f"{least:.3g}"
    margin = max(len(high), len(low))
    num = min(width - margin - 2, len(values))
    edges = [index * len(values) // num for index in range(num + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    span = (most - least) or 1.0
    levels = [1 + round((value - least) / span * (8 * height - 1)) for value in means]
    lines = []
    for row in reversed(range(height)):
        label = high if row == height - 1 else low if row == 0 else ""
        bars = "".join(EIGHTHS[min(max(level - 8 * row, 0), 8)] for level in levels)
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{bars}".rstrip())
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """`8.3 s`, `2 min 45 s` or `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def rl_summary(
    run_name: str,
    duration_s: float,
    num_steps: int,
    rewards: Sequence[float],
    ledger: LedgerReport,
    output_dir: Path,
    width: int,
    *,
    evaluations: Sequence[Record] = (),
    num_packed: int = 0,
    is_resumed: bool = False,
) -> Panel:
    """`evaluations`: records of `metrics/eval.jsonl`, including those before the run was resumed.
    `num_packed`: tokens that went through the trainer, prompts included, while this process watched."""
    speed = []
    if num_packed:
        rate = f"{num_packed / duration_s:,.0f} through the trainer, prompts included"
        speed = [("tokens/s", f"{rate}, {'since the resume' if is_resumed else 'over the whole run'}")]
    facts = [
        *progress(duration_s, num_steps, "reward", rewards, is_resumed=is_resumed),
        *evaluated(evaluations),
        *token_lines(ledger),
        *speed,
        *(("ledger", line) for line in ledger.verdict()),
        *artefacts(output_dir),
    ]
    return summary_panel(run_name, rewards, facts, width)


def token_lines(ledger: LedgerReport) -> list[Fact]:
    """Returns what became of the tokens of all environments together.

    Wasted tokens were sampled to train on, but not trained; neither eval nor what is still in flight.
    """
    states = sum(ledger.states.values(), Counter[str]())
    beside = sum(ledger.beside.values(), Counter[str]())
    trained, evaluated = states.pop(State.TRAINED.value, 0), states.pop(State.EVAL.value, 0)
    states.pop(State.IN_FLIGHT.value, 0)
    wasted = states.total()
    share = wasted / max(trained + wasted, 1)
    facts = [("tokens", f"{trained:,} trained, {wasted:,} wasted ({share:.1%}: sampled, not trained)")]
    for state, number in states.most_common():
        if number:
            facts.append(("", f"  {number:,} {state}: {State(state).meaning}"))
    computed, saved, padding = (beside[flow.value] for flow in (Flow.COMPUTED, Flow.SAVED, Flow.PADDING))
    facts.append(("", f"{computed:,} computed, {saved:,} saved by sharing prompts"))
    if padding:
        facts.append(("", f"{padding:,} of the computed ones only fill up"))
    if evaluated:
        facts.append(("", f"{evaluated:,} sampled for evaluation"))
    return facts


def sft_summary(
    run_name: str, duration_s: float, records: Sequence[Record], output_dir: Path, width: int
) -> Panel:
    """`records`: the metrics of all steps, including those before the run was resumed."""

    def total(name: str) -> float:
        return sum(number_in(record, name) or 0 for record in records)

    losses = [loss for record in records if (loss := number_in(record, "loss")) is not None]
    facts = progress(duration_s, len(records), "loss", losses)
    if num_skipped := int(total("skipped_steps")):
        facts.append(("skipped", f"{num_skipped:,} of these steps: loss or gradient was not finite"))
    facts += _validated(records)
    packed = total("tokens") - total("padding_tokens")
    with_loss, cut = total("loss_tokens"), total("truncated_tokens")
    facts.append(
        ("tokens", f"{packed:,.0f} trained on, {with_loss:,.0f} of them with loss; {cut:,.0f} cut off")
    )
    if seconds := total("time/step_s") - total("time/validate_s"):
        facts.append(("tokens/s", f"{packed / seconds:,.0f} while training"))
    return summary_panel(run_name, losses, [*facts, *artefacts(output_dir)], width)


def _validated(records: Sequence[Record]) -> list[Fact]:
    """Returns the validation losses before, best and last; nothing without validation."""
    losses = [
        (loss, record) for record in records if (loss := number_in(record, "validation/loss")) is not None
    ]
    if not losses:
        return []
    initial = number_in(records[0], "validation/initial_loss")
    before = "" if initial is None else f"{initial:.4f} (before) → "
    (best, at), (last, latest) = min(losses, key=lambda pair: pair[0]), losses[-1]
    tokens = number_in(latest, "validation/tokens") or 0
    text = f"{last:.4f} (last), best {best:.4f} after step {at['step']:,}, over {tokens:,} tokens"
    return [("validation", f"{before}{text}")]


def summary_panel(title: str, values: Sequence[float], facts: Iterable[Fact], width: int) -> Panel:
    """Returns the curve of `values` above what there is to say."""
    width = min(width, WIDTH)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(label, text)
    bars = Text(curve(values, width - 4, CURVE_HEIGHT), style="green", no_wrap=True)
    return Panel(Group(bars, "", table), title=Text(title), width=width)


def progress(
    duration_s: float, num_steps: int, what: str, values: Sequence[float], *, is_resumed: bool = False
) -> list[Fact]:
    since = " since the resume" if is_resumed else ""
    facts = [("duration", f"{format_duration(duration_s)}{since}"), ("steps", f"{num_steps:,}")]
    if values:
        num = min(NUM_AVERAGED, max(1, len(values) // 2))
        first, last = fmean(values[:num]), fmean(values[-num:])
        facts.append((what, f"{first:.4f} (first {num}) → {last:.4f} (last {num})"))
    return facts


def evaluated(records: Sequence[Record]) -> list[Fact]:
    """Returns the first and the last average of each environment."""
    averages: dict[str, list[str]] = {}
    for record in records:
        for name, measures in evaluations_in(record).items():
            if (average := average_in(measures)) is not None:
                key, value = average
                averages.setdefault(f"{name} {key}", []).append(f"{value:.4f} (version {record['step']:,})")
    return [
        ("eval", f"{what} {' → '.join(dict.fromkeys([found[0], found[-1]]))}")
        for what, found in averages.items()
    ]


def artefacts(output_dir: Path) -> list[Fact]:
    """Returns the alarms that rang, the paths of what a run left behind, and the command that shows it."""
    places = [
        ("model", output_dir / "model"),
        ("token exports", output_dir / "token_exports"),
        ("page", output_dir / "page.html"),
        ("logs", output_dir / "logs"),
    ]
    if steps := stable_steps(output_dir / "weights"):
        places.insert(0, ("weights", output_dir / "weights" / f"step_{steps[-1]}"))
    rang = [("alarm", alarm.line().removeprefix("ALARM ")) for alarm in read_alarms(output_dir)]
    found = [(label, str(path)) for label, path in places if path.exists()]
    if output_dir.exists():
        found.append(("look at it", f"pellucid view {shlex.quote(str(output_dir))}"))
    return rang + found
