"""docs/evidence.md, its picture and the README's figures, made from `evidence.json`.

    python -m benchmarks.evidence_page

Everything between a page's marks comes from here; nothing there is written by hand.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.panels import Panel, Series, draw_panels

RESULTS = Path("benchmarks/evidence.json")
PAGE = Path("docs/evidence.md")
PICTURES = Path("docs/images")
WINDOW = 6
"""Steps in a mean of the picture: a step has about fifteen questions, so single ones jump."""

README = Path("README.md")
START, STOP = "<!-- measured -->\n", "<!-- /measured -->\n"
SUMMARY_START, SUMMARY_STOP = "<!-- evidence -->", "<!-- /evidence -->"
Z_95 = 1.959963984540054
"""Quantile of the normal distribution for an interval of 95 %."""


@dataclass(frozen=True)
class Usage:
    wall_s: float
    cpu_s: float
    """Of all processes of the command."""

    load: tuple[float, float]
    """The machine's load average before and after."""


@dataclass(frozen=True)
class Accuracy:
    num_correct: int
    num_questions: int
    """Different ones."""

    def __str__(self) -> str:
        low, high = wilson(self.num_correct, self.num_questions)
        share = self.num_correct / self.num_questions
        return f"{100 * share:.1f} % ({100 * low:.1f} – {100 * high:.1f})"


@dataclass(frozen=True)
class Point:
    """A step: when its batch was complete, and the mean reward of all rollouts scored for it."""

    step: int
    time_s: float
    reward: float
    num_rollouts: int


@dataclass(frozen=True)
class RunResult:
    seed: int
    usage: Usage
    before: Accuracy
    after: Accuracy
    tokens_sampled: int
    tokens_sent: int
    points: list[Point]


@dataclass(frozen=True)
class TaskResult:
    task: str
    warm_up_steps: int
    warm_up: Usage
    base: Accuracy
    runs: list[RunResult]


@dataclass(frozen=True)
class KnownResult:
    """The run of examples/reverse_text_qwen with SmolLM2."""

    usage: Usage
    base: list[float]
    """Rewards of the held-out texts by SmolLM2-135M-Instruct; below, by the model before and after RL."""

    before: list[float]
    after: list[float]
    tokens_sampled: int
    tokens_sent: int
    points: list[Point]


@dataclass(frozen=True)
class Evidence:
    tasks: list[TaskResult]
    known_result: KnownResult | None = None


def wilson(num_correct: int, num_questions: int, z: float = Z_95) -> tuple[float, float]:
    """Returns Wilson's interval of the share of correct answers: `wilson(0, 10)` is (0, 0.278)."""
    share, weight = num_correct / num_questions, z * z / num_questions
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * sqrt(share * (1 - share) / num_questions + weight / (4 * num_questions))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and its normal interval: `mean_interval([0, 1])` is (0.5, -0.48, 1.48)."""
    half = Z_95 * stdev(rewards) / sqrt(len(rewards))
    return mean(rewards), mean(rewards) - half, mean(rewards) + half


def load(path: Path) -> Evidence:
    record = json.loads(path.read_text())
    known = record["known_result"]
    return Evidence([_task(task) for task in record["tasks"]], None if known is None else _known(known))


def _task(task: dict[str, Any]) -> TaskResult:
    runs = [
        RunResult(
            **run
            | {
                "usage": _usage(run["usage"]),
                "before": Accuracy(**run["before"]),
                "after": Accuracy(**run["after"]),
                "points": [Point(**point) for point in run["points"]],
            }
        )
        for run in task["runs"]
    ]
    return TaskResult(
        **task | {"warm_up": _usage(task["warm_up"]), "base": Accuracy(**task["base"]), "runs": runs}
    )


def _known(known: dict[str, Any]) -> KnownResult:
    points = [Point(**point) for point in known["points"]]
    return KnownResult(**known | {"usage": _usage(known["usage"]), "points": points})


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(usage["wall_s"], usage["cpu_s"], (usage["load"][0], usage["load"][1]))


def accuracies(tasks: Sequence[TaskResult]) -> Iterator[str]:
    """Yields the table of held-out accuracy."""
    yield "| task | seed | questions | SmolLM2-135M-Instruct | after warm-up | after RL |"
    yield "|---|---|---|---|---|---|"
    for task in tasks:
        for run in task.runs:
            held_out = f"{run.after.num_questions}"
            yield f"| `{task.task}` | {run.seed} | {held_out} | {task.base} | {run.before} | {run.after} |"


def known_rewards(known: KnownResult) -> Iterator[str]:
    """Yields the table of the held-out texts of the known result."""
    models = (known.base, known.before, known.after)
    yield "| `reverse-text` | texts | SmolLM2-135M-Instruct | after warm-up | after RL |"
    yield "|---|---|---|---|---|"
    means = [_mean_text(*mean_interval(rewards)) for rewards in models]
    exact = [str(Accuracy(sum(reward == 1.0 for reward in rewards), len(rewards))) for rewards in models]
    for what, cells in (("mean reward", means), ("exactly reversed", exact)):
        yield f"| {what} | {len(known.after)} | {' | '.join(cells)} |"


def _mean_text(middle: float, low: float, high: float) -> str:
    """Rewards that are all the same say nothing about an interval."""
    return f"{middle:.3f} ({low:.3f} – {high:.3f})" if low < high else f"{middle:.3f}"


def costs(evidence: Evidence) -> Iterator[str]:
    """Yields the table of time and tokens."""
    yield "| task | seed | steps | rollouts | tokens sampled | in batches | wall time | CPU time | load |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for task in evidence.tasks:
        yield (f"| `{task.task}` | warm-up | {task.warm_up_steps} | | | | {_cost(task.warm_up)} |")
        for run in task.runs:
            yield _cost_row(task.task, run.seed, run)
    if (known := evidence.known_result) is not None:
        yield _cost_row("reverse-text", 0, known)


def _cost_row(task: str, seed: int, run: RunResult | KnownResult) -> str:
    rollouts = sum(point.num_rollouts for point in run.points)
    return (
        f"| `{task}` | {seed} | {len(run.points)} | {rollouts:,} | {run.tokens_sampled:,} "
        f"| {run.tokens_sent:,} | {_cost(run.usage)} |"
    )


def _cost(usage: Usage) -> str:
    before, after = usage.load
    return f"{usage.wall_s / 60:.1f} min | {usage.cpu_s / 60:.1f} min | {before:.1f} → {after:.1f}"


def measured(evidence: Evidence) -> str:
    """Returns the generated part of the page."""
    parts = [
        "![Mean reward over the steps of rl, a line per seed; dots are held-out accuracy with its interval, "
        "for reverse-text held-out reward]"
        "(images/evidence.svg)",
        "",
        *accuracies(evidence.tasks),
        "",
        *(() if evidence.known_result is None else (*known_rewards(evidence.known_result), "")),
        *costs(evidence),
        "",
    ]
    return "\n".join(parts)


def _panel(task: TaskResult) -> Panel:
    series = [
        Series(
            f"seed {run.seed}",
            [point.reward for point in run.points],
            [_share(0, run.before), _share(len(run.points), run.after)],
        )
        for run in task.runs
    ]
    return Panel(task.task, series)


def _share(step: int, accuracy: Accuracy) -> tuple[float, float, float, float]:
    low, high = wilson(accuracy.num_correct, accuracy.num_questions)
    return step, low, accuracy.num_correct / accuracy.num_questions, high


def _mean(step: int, rewards: Sequence[float]) -> tuple[float, float, float, float]:
    middle, low, high = mean_interval(rewards)
    return step, low, middle, high


def summary(tasks: Sequence[TaskResult]) -> str:
    """Returns the README's figures: accuracy of each task before and after RL, lowest and highest seed."""
    parts = []
    for task in tasks:
        before, after = (_span([run.before for run in task.runs]), _span([run.after for run in task.runs]))
        seeds = f"{len(task.runs)} seed" + "s" * (len(task.runs) > 1)
        parts.append(f"`{task.task}` from {before} % to {after} % ({seeds})")
    return ", ".join(parts)


def _span(accuracies: Sequence[Accuracy]) -> str:
    shares = [round(100 * each.num_correct / each.num_questions) for each in accuracies]
    return f"{min(shares)}" if min(shares) == max(shares) else f"{min(shares)} – {max(shares)}"


def write_page(
    evidence: Evidence, page: Path = PAGE, pictures: Path = PICTURES, readme: Path = README
) -> None:
    panels = [_panel(task) for task in evidence.tasks]
    if (known := evidence.known_result) is not None:
        rewards = [point.reward for point in known.points]
        dots = [(0, known.before), (len(rewards), known.after)]
        panels.append(Panel("reverse-text", [Series("seed 0", rewards, [_mean(*dot) for dot in dots])]))
    (pictures / "evidence.svg").write_text(draw_panels(panels, WINDOW))
    _replace(page, START, f"\n{measured(evidence)}\n", STOP)
    _replace(readme, SUMMARY_START, summary(evidence.tasks), SUMMARY_STOP)


def _replace(path: Path, start: str, text: str, stop: str) -> None:
    before, _, rest = path.read_text().partition(start)
    _, _, after = rest.partition(stop)
    path.write_text(f"{before}{start}{text}{stop}{after}")


if __name__ == "__main__":
    write_page(load(RESULTS))
