"""Kills the processes of a run at random moments, resumes it each time, and checks that nothing went missing.

    python tests/chaos.py --kills 30 --seed 0      (make chaos)

After every kill the books have to balance. In the end no step is missing or double, and every example of the
stream was trained exactly once or stands in the saved rollouts with what became of it.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model
from warm import processes_of

VICTIMS = ("inference", "orchestrator", "trainer", "launcher", "ctrl-c")
START_S = 6.0
"""How long a run takes to start. A third of the kills falls into it, the others after the first new step."""


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


def strike(run: Any, folder: Path, victim: str) -> bool:
    """False if there was nobody to strike."""
    if victim in ("launcher", "ctrl-c"):
        run.send_signal(signal.SIGKILL if victim == "launcher" else signal.SIGINT)
        return True
    pid = processes_of(folder).get(victim)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid is not None


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


def rampage(
    folder: Path,
    num_kills: int,
    seed: int,
    start: Callable[[list[str]], Any] = start_for_real,
    start_s: float = START_S,
) -> str:
    """Kills so often, finishes the run, and returns what became of it; a run that lost something raises."""
    generator = random.Random(seed)
    make_tiny_model(folder / "tiny", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    max_steps = 1_000_000  # until the last kill
    kills: Counter[str] = Counter()
    while kills.total() < num_kills:
        victim = generator.choice(VICTIMS)
        in_start = generator.random() < 1 / 3
        delay_s = generator.uniform(0, start_s if in_start else 3.0)
        before = num_steps(folder / "run")
        run = start(arguments_of(folder, max_steps))
        while not in_start and num_steps(folder / "run") <= before:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        time.sleep(delay_s)
        assert run.poll() is None, run.communicate()[0]
        while not strike(run, folder / "run", victim):  # on a busy machine it may not have started yet
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        kills[victim] += 1
        output, _ = run.communicate(timeout=600)
        check_books(folder / "run")
        resumed = re.search(r"^resuming at.*$", output, re.MULTILINE)
        print(
            f"kill {kills.total():3d}  {victim:<12} {'starting' if in_start else 'training'} "
            f"{delay_s:3.1f} s; {resumed[0] if resumed else 'new run'}",
            flush=True,
        )
    num_done = num_steps(folder / "run")
    last = start(arguments_of(folder, num_done + 5))
    output, _ = last.communicate()
    assert last.returncode == 0, output
    states = check_run(folder / "run", num_done + 5)
    print(output)
    return f"{kills.total()} kills ({dict(kills)}), {num_done + 5} steps, tokens: {dict(states)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run is; one of its own by default")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="pellucid-chaos-"))
    print(rampage(folder, arguments.kills, arguments.seed))


if __name__ == "__main__":
    main()
