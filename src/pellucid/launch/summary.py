"""The end of a run on one screen: how long, how much better, whether the books balance, what is where."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.data.alarms import Alarm
from pellucid.launch.console import WIDTH
from pellucid.launch.follow import Record
from pellucid.ledger import MEANING, Flow, Report, State
from pellucid.metrics.evaluation import average_in, evaluations_in
from pellucid.transport.spool import stable_steps

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
    high, low = f"{max(values):.3g}", f"{min(values):.3g}"
    margin = max(len(high), len(low))
    scale = _scale(min(values), max(values), 8 * height)
    levels = [scale(value) for value in _averaged(values, width - margin - 2)]
    lines = []
    for row in reversed(range(height)):
        label = high if row == height - 1 else low if row == 0 else ""
        bars = "".join(EIGHTHS[min(max(level - 8 * row, 0), 8)] for level in levels)
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{bars}".rstrip())
    return "\n".join(lines)


def _averaged(values: Sequence[float], num: int) -> list[float]:
    """At most `num` values, each the mean of its share of `values`."""
    num = min(num, len(values))
    edges = [index * len(values) // num for index in range(num + 1)]
    return [mean(values[edges[index] : edges[index + 1]]) for index in range(num)]


def _scale(low: float, high: float, num_levels: int) -> Callable[[float], int]:
    """From a value to its level: 1 for `low`, `num_levels` for `high`."""
    span = (high - low) or 1.0
    return lambda value: 1 + round((value - low) / span * (num_levels - 1))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def format_duration(seconds: float) -> str:
    """`8.3 s`, `2 min 45 s` or `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Token counts of all environments together, by what became of them."""

    trained: int
    reasons: Mapping[str, int]
    """The wasted ones by their state in the ledger."""

    evaluated: int
    computed: int
    saved: int
    padding: int

    @classmethod
    def of(cls, ledger: Report) -> "TokenUse":
        states, beside = _total(ledger.states.values()), _total(ledger.beside.values())
        trained, evaluated = states[State.TRAINED.value], states[State.EVAL.value]
        unwasted = (State.TRAINED.value, State.EVAL.value, State.IN_FLIGHT.value)
        reasons = {name: number for name, number in states.most_common() if number and name not in unwasted}
        computed, saved, padding = (beside[flow.value] for flow in (Flow.COMPUTED, Flow.SAVED, Flow.PADDING))
        return cls(trained, reasons, evaluated, computed, saved, padding)

    @property
    def wasted(self) -> int:
        """Sampled to train on, but not trained; neither eval nor what is still in flight."""
        return sum(self.reasons.values())

    def lines(self) -> list[Fact]:
        share = self.wasted / max(self.trained + self.wasted, 1)
        evaluated = [("", f"{self.evaluated:,} sampled for evaluation")] if self.evaluated else []
        padded = [("", f"{self.padding:,} of the computed ones only fill up")] if self.padding else []
        return [
            (
                "tokens",
                f"{self.trained:,} trained, {self.wasted:,} wasted ({share:.1%}: sampled, not trained)",
            ),
            *(
                ("", f"  {number:,} {state}: {MEANING[State(state)]}")
                for state, number in self.reasons.items()
            ),
            ("", f"{self.computed:,} computed, {self.saved:,} saved by sharing prompts"),
            *padded,
            *evaluated,
        ]


def _total(parts: Iterable[Counter[str]]) -> Counter[str]:
    return sum(parts, Counter())


@dataclass(frozen=True, slots=True)
class Summary:
    run_name: str
    duration_s: float
    num_steps: int
    rewards: Sequence[float]
    ledger: Report
    output_dir: Path
    evaluations: Sequence[Record] = ()
    """Records of `metrics/eval.jsonl`, including those before the run was resumed."""

    num_packed: int = 0
    """Tokens that went through the trainer, prompts included, while this process watched."""

    is_resumed: bool = False
    alarms: Sequence[Alarm] = ()

    def panel(self, width: int) -> Panel:
        facts = [
            *progress(self.duration_s, self.num_steps, "reward", self.rewards, is_resumed=self.is_resumed),
            *evaluated(self.evaluations),
            *TokenUse.of(self.ledger).lines(),
            *self._speed(),
            *(("ledger", line) for line in self.ledger.verdict()),
            *rung(self.alarms),
            *artefacts(self.output_dir),
        ]
        return summary_panel(self.run_name, self.rewards, facts, width)

    def _speed(self) -> list[Fact]:
        if not self.num_packed:
            return []
        rate = f"{self.num_packed / self.duration_s:,.0f} through the trainer, prompts included"
        return [("tokens/s", f"{rate}, {'since the resume' if self.is_resumed else 'over the whole run'}")]


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
        first, last = mean(values[:num]), mean(values[-num:])
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


def rung(alarms: Sequence[Alarm]) -> list[Fact]:
    """Returns a line of the summary for each alarm."""
    return [("alarm", alarm.line().removeprefix("ALARM ")) for alarm in alarms]


def artefacts(output_dir: Path) -> list[Fact]:
    """Returns the paths of what a run left behind for its user."""
    places = [
        ("model", output_dir / "model"),
        ("token exports", output_dir / "token_exports"),
        ("page", output_dir / "page.html"),
        ("logs", output_dir / "logs"),
    ]
    if steps := stable_steps(output_dir / "weights"):
        places.insert(0, ("weights", output_dir / "weights" / f"step_{steps[-1]}"))
    return [(label, str(path)) for label, path in places if path.exists()]
