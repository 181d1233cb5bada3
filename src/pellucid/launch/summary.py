"""The end of a run on one screen: how long, how much better, whether the books balance, what is where."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.data.alarms import read_alarms
from pellucid.launch.console import WIDTH, Record, number_in
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
    return [fmean(values[edges[index] : edges[index + 1]]) for index in range(num)]


def _scale(low: float, high: float, num_levels: int) -> Callable[[float], int]:
    """From a value to its level: 1 for `low`, `num_levels` for `high`."""
    span = (high - low) or 1.0
    return lambda value: 1 + round((value - low) / span * (num_levels - 1))


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
    ledger: Report,
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


def token_lines(ledger: Report) -> list[Fact]:
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
            facts.append(("", f"  {number:,} {state}: {MEANING[State(state)]}"))
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
    """Returns the alarms that rang, and the paths of what a run left behind for its user."""
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
    return [*rang, *found, ("look at it", f"pellucid view {shlex.quote(str(output_dir))}")]
