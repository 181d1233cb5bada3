"""What readers get of a race: tables in docs/peers.md, a picture, README's sentence, benchmarks/peers.json.

The tables are between markers, `<!-- TASK -->` and `<!-- /TASK -->`, and README's sentence between
`<!-- race -->` and `<!-- /race -->`. All of it follows from the runs; a test holds the pages to the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.curve import Curve, Work
from benchmarks.drawing import draw

TRIAL = "trial: "
"""How the setting of a run begins that only tries it out for a few steps."""

OURS, THEIRS = "pellucid", "TRL"
SAMPLES_PER_STEP = 128  # of the task that has a target
RUNS = Path("benchmarks/peers.json")
PAGE = Path("docs/peers.md")
README = Path("README.md")
PICTURE = Path("docs/images/peers.svg")
_PICTURE_LINE = (
    "![Mean reward over wall time: thin lines are steps, thick ones means over ten](images/peers.svg)"
)
_JSON_LINE = "All points are in [peers.json](../benchmarks/peers.json)."


def publish(task: str, curves: Sequence[Curve], target: float | None, root: Path = Path()) -> None:
    """Makes everything anew that shows the runs of this task; other tasks stay as they are."""
    every = json.loads((root / RUNS).read_text())
    every[task] = [curve.as_dict() for curve in curves]
    lines = [f"{json.dumps(name)}: {json.dumps(runs)}" for name, runs in every.items()]
    (root / RUNS).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    _replace(root / PAGE, task, f"\n\n{tables(curves, target)}\n\n")
    if target is not None and (sentence := headline(curves, target)):
        (root / PICTURE).write_text(draw(racing(curves, target), target))
        _replace(root / README, "race", sentence)


def load_runs(root: Path) -> dict[str, list[Curve]]:
    """Reads the published runs, by task."""
    every = json.loads((root / RUNS).read_text())
    return {task: [Curve.from_dict(run) for run in runs] for task, runs in every.items()}


def between(text: str, marker: str) -> str:
    """Returns what a page has between `<!-- marker -->` and `<!-- /marker -->`."""
    _, found, rest = text.partition(f"<!-- {marker} -->")
    inner, ended, _ = rest.partition(f"<!-- /{marker} -->")
    if not (found and ended):
        raise ValueError(f"the page has no <!-- {marker} --> … <!-- /{marker} -->")
    return inner


def _replace(page: Path, marker: str, inner: str) -> None:
    text = page.read_text()
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    page.write_text(text.replace(f"{start}{between(text, marker)}{end}", f"{start}{inner}{end}"))


def tables(curves: Sequence[Curve], target: float | None) -> str:
    if target is None:
        return f"{paces(curves)}\n\n{_JSON_LINE}"
    parts = [
        _PICTURE_LINE,
        summary(curves, target),
        figures(curves, target),
        tried(curves, target),
        _JSON_LINE,
    ]
    return "\n\n".join(part for part in parts if part)


def in_full(curves: Sequence[Curve]) -> list[Curve]:
    """Leaves out the runs that only tried a setting for a few steps."""
    return [curve for curve in curves if not curve.setting.startswith(TRIAL)]


def winner(curves: Sequence[Curve], target: float, name: str) -> str | None:
    """Returns the setting that got to the target first on the first seed, where several ran in full; None if
    none did."""
    runs = [curve for curve in in_full(curves) if curve.name == name]
    first = [run for run in runs if run.seed == runs[0].seed and run.reached(target)]
    return min(first, key=lambda run: _seconds(run, target)).setting if first else None


def racing(curves: Sequence[Curve], target: float) -> list[Curve]:
    """Runs that are compared: of each side, those with the setting that won."""
    won = {name: winner(curves, target, name) for name in (OURS, THEIRS)}
    return [curve for curve in in_full(curves) if curve.setting == won[curve.name]]


def _seconds(curve: Curve, target: float) -> float:
    reached = curve.reached(target)
    return float("inf") if reached is None else reached[0]


def _times(curves: Sequence[Curve], target: float) -> tuple[list[float], list[float]]:
    """Seconds to the target of both sides, in order, on the seeds that both have run; infinite for a run that
    did not get there."""
    runs = {(curve.name, curve.seed): _seconds(curve, target) for curve in racing(curves, target)}
    seeds = {seed for _, seed in runs if {(OURS, seed), (THEIRS, seed)} <= runs.keys()}
    ours, theirs = (sorted(runs[name, seed] for seed in seeds) for name in (OURS, THEIRS))
    return ours, theirs


def spread(times: Sequence[float]) -> str:
    """`55 s (54 to 57)`; a single time stands alone."""
    around = f" ({times[0]:.0f} to {times[-1]:.0f})" if len(times) > 1 else ""
    return f"{median(times):.0f} s{around}"


def headline(curves: Sequence[Curve], target: float) -> str:
    """README's sentence; empty while one side has no run that got to the target."""
    ours, theirs = _times(curves, target)
    if not ours or float("inf") in (*ours, *theirs):
        return ""
    return (
        f"the demo's task reaches a reward of {target} in {spread(ours)}, with TRL's GRPO trainer in "
        f"{spread(theirs)}{_seeds(ours)}"
    )


def _seeds(times: Sequence[float]) -> str:
    return f", medians and range of {len(times)} seeds" if len(times) > 1 else ", one seed"


def summary(curves: Sequence[Curve], target: float) -> str:
    """`Reward 0.9 after 55 s (54 to 57) with pellucid and …: 2.33 × sooner.`"""
    ours, theirs = _times(curves, target)
    if not headline(curves, target):
        return ""
    ratio = median(theirs) / median(ours)
    return (
        f"Reward {target} after **{spread(ours)}** with pellucid ({winner(curves, target, OURS)}) and "
        f"**{spread(theirs)}** with TRL ({winner(curves, target, THEIRS)}){_seeds(ours)}: "
        f"**{ratio:.2f} ×** sooner."
    )


def figures(curves: Sequence[Curve], target: float) -> str:
    """A row per run that is compared."""
    rows = [
        f"| seed | | start-up | reward {target} after | samples | sampling | training | own CPU | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for curve in racing(curves, target):
        reached = curve.reached(target)
        after = f"{reached[0]:.1f} s" if reached else f"not within {curve.points[-1][0]:.0f} s"
        steps = reached[1] if reached else len(curve.points)
        cells = [
            curve.seed,
            curve.name,
            f"{curve.startup_s:.1f} s",
            after,
            f"{steps * SAMPLES_PER_STEP:,}",
            *_work(curve),
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def _work(curve: Curve) -> list[str]:
    """Cells: tokens per second of both phases, own CPU time, and the load beside the run."""
    return [*map(_rate, (curve.sampling, curve.training)), f"{curve.cpu_s:.0f} s", f"{curve.other_load:.2f}"]


def _rate(work: Work) -> str:
    return f"{work.rate:,.0f} tok/s"


def tried(curves: Sequence[Curve], target: float) -> str:
    """A row per setting that was tried, on the first seed."""
    rows = [
        f"| tried on seed {curves[0].seed} | | a step, of a few | reward {target} after |",
        "|---|---|---|---|",
    ]
    runs = {(run.name, run.setting): run for run in curves if run.seed == curves[0].seed}
    for name, setting in dict.fromkeys((name, setting.removeprefix(TRIAL)) for name, setting in runs):
        trial, full = runs.get((name, f"{TRIAL}{setting}")), runs.get((name, setting))
        step = f"{step_s(trial):.3f} s" if trial else ""
        rows.append(f"| {name} | {setting} | {step} | {_after(full, target)} |")
    return "\n".join(rows)


def _after(run: Curve | None, target: float) -> str:
    if run is None:
        return ""
    reached = run.reached(target)
    return f"{reached[0]:.1f} s" if reached else f"not within {run.points[-1][0]:.0f} s"


def step_s(curve: Curve) -> float:
    """Seconds per step between the first scores and the last, for a trial of a few steps."""
    times = [time_s for time_s, _ in curve.points]
    num_later = sum(time_s > times[0] for time_s in times)
    return (times[-1] - times[0]) / num_later


def paces(curves: Sequence[Curve]) -> str:
    """A row per run that was timed over a number of steps."""
    rows = [
        "| | start-up | steps per minute | sampling | training | own CPU | others |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in in_full(curves):
        name = f"{curve.name} ({curve.setting})" if curve.setting else curve.name
        cells = [name, f"{curve.startup_s:.1f} s", f"{curve.steps_per_minute:.2f}", *_work(curve)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def told(curve: Curve, target: float | None) -> str:
    """A line about a run that has just ended."""
    who = f"{curve.name}{' (' + curve.setting + ')' if curve.setting else ''}, seed {curve.seed}"
    start = f"{who}: {curve.startup_s:.1f} s to start, {curve.num_trained} steps in {curve.trained_s:.1f} s"
    start += f", others kept {curve.other_load:.2f} cores busy"
    if target is None or curve.setting.startswith(TRIAL):
        return start
    reached = curve.reached(target)
    return f"{start}; reward {target} " + (f"after {reached[0]:.1f} s" if reached else "not reached")
