"""Kills, stops and starves the processes of a run at random moments, and checks that nothing went missing.

    python tests/chaos.py --blows 30 --seed 0      (make chaos KILLS=30)

After every blow the books have to balance. In the end no step is missing or double, and every example of the
stream was trained exactly once or stands in the saved rollouts with what became of it.

With `--folder` it goes on where it was, if it was interrupted itself: blows that were checked are in
`FOLDER/blows.jsonl`.
"""

import argparse
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model
from warm import processes_of

PARTS = ("inference", "orchestrator", "trainer")
VICTIMS = (*PARTS, "launcher", "ctrl-c")
START_S = 6.0
"""How long a run takes to start. A third of the kills falls into it, the others after the first new step."""

WRITTEN = {"checkpoint": "checkpoints", "weights": "weights"}
"""Where the trainer writes what a blow of this way interrupts."""

WAYS = ("kill", "kill", "kill", "kill", "checkpoint", "weights", "hang", "full disk")
MOMENT_S = 60.0
"""How long a half-written folder is waited for."""


@dataclass(frozen=True)
class Blow:
    """One strike at a run."""

    way: str
    """`kill`; `checkpoint`, `weights`: the same as the trainer writes one; `hang`: the victim is stopped for
    `delay_s` and goes on; `full disk`: no file of the victim grows any more."""

    victim: str
    delay_s: float
    in_start: bool = False
    resumed_s: float | None = None
    """From the start of the run until it trained a new step; None if it was struck before."""

    @property
    def name(self) -> str:
        return self.victim if self.way == "kill" else f"{self.way}, {self.victim}"


def draw(seed: int, number: int, start_s: float) -> Blow:
    generator = random.Random(f"{seed} {number}")
    way = generator.choice(WAYS)
    if way == "kill":
        in_start = generator.random() < 1 / 3
        return Blow(
            way, generator.choice(VICTIMS), generator.uniform(0, start_s if in_start else 3.0), in_start
        )
    if way in WRITTEN:
        return Blow(way, "trainer", 0.0)
    return Blow(way, generator.choice(PARTS), generator.uniform(0, 5.0))


def start_for_real(arguments: list[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pellucid.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def arguments_of(folder: Path, max_steps: int) -> list[str]:
    return [
        *("rl", "--resume", "--model.name", str(folder / "tiny"), "--output-dir", str(folder / "run")),
        *("--max-steps", str(max_steps), "--seq-len", "256", "--trainer.ckpt.interval", "4"),
        *("--orchestrator.env", '[{"id": "reverse-text"}]', "--orchestrator.batch-size", "16"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.max-inflight-rollouts", "24"),
        *("--orchestrator.sampling.max-tokens", "8", "--trainer.experimental.token-export"),
    ]


def strike(run: Any, folder: Path, blow: Blow) -> bool:
    """False if there was nobody to strike."""
    if blow.victim in ("launcher", "ctrl-c"):
        run.send_signal(signal.SIGKILL if blow.victim == "launcher" else signal.SIGINT)
        return True
    pid = processes_of(folder).get(blow.victim)
    if pid is None:
        return False
    if blow.way == "hang":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(blow.delay_s)
        os.kill(pid, signal.SIGCONT)
    elif blow.way == "full disk":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    else:
        os.kill(pid, signal.SIGKILL)
    return True


def strike_writer(run: Any, folder: Path, blow: Blow) -> Blow:
    """Kills the trainer as it writes a folder, or after a while; returns the blow as it was.

    That is a plain kill if nothing half-written is left: then the trainer was faster.
    """
    parent = folder / WRITTEN[blow.way]
    while (pid := processes_of(folder).get(blow.victim)) is None:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    deadline = time.monotonic() + MOMENT_S
    while time.monotonic() < deadline and not any(parent.glob(".*.partial*")):
        assert run.poll() is None, run.communicate()[0]
    os.kill(pid, signal.SIGKILL)
    while processes_of(folder).get(blow.victim) == pid:
        time.sleep(0.01)
    return blow if any(parent.glob(".*.partial*")) else replace(blow, way="kill")


def wait_for_new_step(run: Any, folder: Path, before: int) -> None:
    while num_steps(folder) <= before:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)


def num_steps(folder: Path) -> int:
    steps = [record["step"] for record in read_metrics(folder / "metrics" / "orchestrator.jsonl")]
    return max(steps, default=-1) + 1


def check_books(folder: Path) -> None:
    if any(path.stat().st_size for path in (folder / "ledger").glob("*.jsonl")):
        report = reconcile(folder / "ledger")
        assert report.balanced, report.differences


def check_run(folder: Path, max_steps: int) -> Counter[str]:
    for process in ("trainer", "orchestrator"):
        steps = [record["step"] for record in read_metrics(folder / "metrics" / f"{process}.jsonl")]
        assert steps == list(range(max_steps)), f"{process}: {steps}"
    report = reconcile(folder / "ledger")
    assert report.balanced and not report.running, report.verdict()
    rollouts = [
        json.loads(line)
        for path in folder.glob("rollouts/step_*/train_rollouts.jsonl")
        for line in path.read_text().splitlines()
    ]
    names = Counter(rollout["rollout_id"] for rollout in rollouts)
    assert names.most_common(1)[0][1] == 1, names.most_common(3)
    trained = {(r["example_id"], r["group_id"]) for r in rollouts if r["outcome"] == "sent"}
    per_example = Counter(example for example, _ in trained)
    assert per_example.most_common(1)[0][1] == 1, per_example.most_common(3)
    known = {int(rollout["example_id"]) for rollout in rollouts}
    assert known == set(range(len(known))), sorted(set(range(max(known))) - known)
    (states,) = report.states.values()
    assert sum(r["num_tokens"] for r in rollouts if r["outcome"] == "sent") == (
        states["trained"] + states["masked"]
    )
    return states


def struck(folder: Path) -> list[Blow]:
    """Returns the blows that were checked so far."""
    path = folder / "blows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Blow(**json.loads(line)) for line in lines]


def rampage(
    folder: Path,
    num_blows: int,
    seed: int,
    start: Callable[[list[str]], Any] = start_for_real,
    start_s: float = START_S,
) -> str:
    """Strikes so often, finishes the run, and returns what became of it; a run that lost something raises."""
    if not (folder / "tiny").exists():
        make_tiny_model(folder / "tiny", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    max_steps = 1_000_000  # until the last blow
    while (number := len(struck(folder))) < num_blows:
        blow = draw(seed, number, start_s)
        before = num_steps(folder / "run")
        started = time.monotonic()
        run = start(arguments_of(folder, max_steps))
        try:
            output, blow = suffer(run, folder / "run", blow, before, started)
        finally:
            run.kill()
        check_books(folder / "run")
        with (folder / "blows.jsonl").open("a") as file:
            file.write(json.dumps(asdict(blow)) + "\n")
        resumed = re.search(r"^resuming at.*$", output, re.MULTILINE)
        print(
            f"blow {number + 1:4d}  {blow.name:<24} {'starting' if blow.in_start else 'training'} "
            f"{blow.delay_s:3.1f} s; {resumed[0] if resumed else 'new run'}",
            flush=True,
        )
    num_done = num_steps(folder / "run")
    last = start(arguments_of(folder, num_done + 5))
    output, _ = last.communicate()
    assert last.returncode == 0, output
    states = check_run(folder / "run", num_done + 5)
    print(output)
    blows = struck(folder)
    names = Counter(blow.name for blow in blows)
    return f"{len(blows)} blows ({dict(names)}), {num_done + 5} steps, tokens: {dict(states)}"


def suffer(run: Any, folder: Path, blow: Blow, before: int, started: float) -> tuple[str, Blow]:
    """Strikes a run that was just started and waits for its end; returns output and blow, as it was."""
    if not blow.in_start:
        wait_for_new_step(run, folder, before)
        blow = replace(blow, resumed_s=time.monotonic() - started)
    if blow.way in WRITTEN:
        blow = strike_writer(run, folder, blow)
    else:
        time.sleep(blow.delay_s if blow.way == "kill" else 0.0)
        assert run.poll() is None, run.communicate()[0]
        while not strike(run, folder, blow):  # on a busy machine it may not have started yet
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
    if blow.way == "hang":  # nothing may have ended
        wait_for_new_step(run, folder, num_steps(folder))
        run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=600)
    if blow.way == "full disk":
        assert run.returncode == 74, output
    return output, blow


def table(blows: list[Blow]) -> str:
    """Returns a Markdown table: after which blow it took how long to train a new step."""
    taken: dict[str, list[float]] = {}
    for blow, following in pairwise(blows):
        if following.resumed_s is not None:
            taken.setdefault(blow.name, []).append(following.resumed_s)
    counts = Counter(blow.name for blow in blows)
    lines = ["| blow | times | new step after the start: median | longest |", "|---|---|---|---|"]
    for name, times in sorted(taken.items()):
        lines.append(f"| {name} | {counts[name]} | {statistics.median(times):.1f} s | {max(times):.1f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blows", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run is; one of its own by default")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="pellucid-chaos-"))
    summary = rampage(folder, arguments.blows, arguments.seed)
    print(table(struck(folder)))
    print(summary)


if __name__ == "__main__":
    main()
