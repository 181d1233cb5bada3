"""Time to learn the demo's task, beside other trainers: the same warm weights, words, budget and machine.

    python -m benchmarks.peers [--seeds 0 1] [--target 0.9]

One run after the other, each with both cores. Writes the curves to benchmarks/peers.json, draws them into
docs/images/peers.svg and puts the figures into docs/peers.md. The clock of a run starts when it begins to
sample, with everything loaded; how long the loading took is told beside it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.curve import Curve
from benchmarks.drawing import draw
from pellucid.metrics import read_metrics

HERE = Path("benchmarks")
OUTPUTS = Path("outputs/peers")
POLL_S = 0.5
START, STOP = "<!-- measured -->\n", "<!-- /measured -->\n"
PICTURE = "![Mean reward over wall time: thin lines are steps, thick ones means over ten](images/peers.svg)"
CURVES = "All points are in [peers.json](../benchmarks/peers.json)."


def warm_up(folder: Path) -> Path:
    """The checkpoint that all start from: the demo's model after its supervised warm-up."""
    model = folder / "sft" / "model"
    if not model.is_dir():
        example = Path("examples/reverse_text")
        run([sys.executable, str(example / "prepare.py"), str(folder)])
        run(
            [
                *(sys.executable, "-m", "pellucid.cli", "sft", "@", str(example / "sft.toml")),
                *("--model.name", str(folder / "model"), "--data.path", str(folder / "warmup.jsonl")),
                *("--output-dir", str(folder / "sft"), "--clean-output-dir"),
            ]
        )
    return model


def run(command: Sequence[str]) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def train_with_trl(model: Path, seed: int, target: float, max_s: float) -> Curve:
    path = OUTPUTS / f"trl_{seed}.json"
    options = ["--seed", seed, "--target", target, "--max-s", max_s, "--called", time.time()]
    run([sys.executable, "-m", "benchmarks.trl_grpo", str(model), str(path), *map(str, options)])
    return Curve.load(path)


def train_with_pellucid(model: Path, seed: int, target: float, max_s: float) -> Curve:
    """`pellucid rl`, interrupted when the task is learned."""
    folder = OUTPUTS / "pellucid"
    command = [
        *(sys.executable, "-m", "pellucid.cli", "rl", "@", str(HERE / "peers.toml")),
        *("--model.name", str(model), "--output-dir", str(folder), "--seed", str(seed), "--clean-output-dir"),
    ]
    print("$", *command, flush=True)
    started = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            curve = curve_of(folder, seed, started)
            is_over = bool(curve.points) and curve.points[-1][0] > max_s
            if is_over or curve.reached(target) is not None:
                break
        else:
            sys.exit(f"pellucid ended with {process.returncode}; see {folder / 'logs'}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    return curve


def curve_of(folder: Path, seed: int, started: float) -> Curve:
    records = [
        record
        for record in read_metrics(folder / "metrics" / "orchestrator.jsonl")
        if record["time"] > started  # not those of an earlier run, which are about to be deleted
    ]
    if not records:
        return Curve("pellucid", seed)
    first_sampling = records[0]["time"] - records[0]["time/batch_s"]
    points = [(record["time"] - first_sampling, record["reward/all"]) for record in records]
    return Curve("pellucid", seed, first_sampling - started, points)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's task with pellucid and with TRL.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=0.9, help="mean reward over ten steps")
    parser.add_argument("--max-s", type=float, default=300, help="a run is stopped after so long")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = warm_up(OUTPUTS)
    curves: list[Curve] = []
    for seed in options.seeds:
        for train in (train_with_trl, train_with_pellucid):
            curves.append(train(model, seed, options.target, options.max_s))
            print(told(curves[-1], options.target), flush=True)
    (HERE / "peers.json").write_text(json.dumps([asdict(curve) for curve in curves]) + "\n")
    Path("docs/images/peers.svg").write_text(draw(curves, options.target))
    table = figures(curves, options.target)
    page = Path("docs/peers.md")
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(STOP)
    page.write_text(f"{before}{START}\n{PICTURE}\n\n{table}\n{CURVES}\n{STOP}{after}")
    print(table)


def figures(curves: Sequence[Curve], target: float) -> str:
    """A table; TRL's run comes before pellucid's of the same seed."""
    rows = [
        f"| seed | | start-up | steps | a step | reward {target} after | sooner |",
        "|---|---|---|---|---|---|---|",
    ]
    before: float | None = None
    for curve in curves:
        reached = curve.reached(target)
        time_s, steps = reached or (curve.points[-1][0], len(curve.points))
        ratio = f"{before / time_s:.2f} ×" if curve.name == "pellucid" and before and reached else ""
        before = time_s if reached else None
        after = f"{time_s:.1f} s" if reached else f"not within {time_s:.0f} s"
        startup, each = f"{curve.startup_s:.1f} s", f"{time_s / steps:.3f} s"
        rows.append(f"| {curve.seed} | {curve.name} | {startup} | {steps} | {each} | {after} | {ratio} |")
    return "\n".join(rows) + "\n"


def told(curve: Curve, target: float) -> str:
    start = f"{curve.name}, seed {curve.seed}: {curve.startup_s:.1f} s to start, "
    if (reached := curve.reached(target)) is None:
        last = curve.smoothed()[-1][1] if curve.smoothed() else float("nan")
        return f"{start}{target} not reached in {len(curve.points)} steps (last {last:.3f})"
    time_s, steps = reached
    return f"{start}reward {target} after {time_s:.1f} s and {steps} steps, {time_s / steps:.3f} s each"


if __name__ == "__main__":
    main()
