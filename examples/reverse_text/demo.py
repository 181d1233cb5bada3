"""The whole path on a laptop: a model learns to reverse words by asynchronous RL.

    python examples/reverse_text/demo.py [--seed N]

runs the commands below one after the other; each of them works on its own, too.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from pellucid.metrics import read_metrics

HERE = Path("examples/reverse_text")
OUTPUTS = Path("outputs/reverse_text")
console = Console(width=100, highlight=False)


def run(*command: str) -> None:
    """Runs a command as a user would, shows it, and stops the demo if it fails."""
    console.print(f"\n[bold]$ {' '.join(command)}[/bold]")
    arguments = [sys.executable, *(("-m", "pellucid.cli") if command[0] == "pellucid" else ()), *command[1:]]
    finished = subprocess.run(arguments, check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def show_rollouts(title: str, step: int, count: int = 3) -> None:
    """A few words and what the policy made of them at a step."""
    path = OUTPUTS / "rl" / "rollouts" / f"step_{step}" / "train_rollouts.jsonl"
    seen: set[str] = set()
    console.print(f"\n{title}", style="bold")
    for line in path.read_text().splitlines():
        rollout = json.loads(line)
        word = rollout["messages"][-1]["content"]
        if word not in seen and rollout["reward"] is not None:
            seen.add(word)
            answer = rollout["trajectory"][0]["text"].replace("\n", "⏎")
            console.print(f"  {word:>8} → {answer:<12} reward {rollout['reward']:.2f}", markup=False)
        if len(seen) == count:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model by RL and look at its tokens.")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, sampling and initialisation")
    seed = str(parser.parse_args().seed)
    started = time.monotonic()
    run("python", str(HERE / "prepare.py"), str(OUTPUTS), "--seed", seed)
    # The demo may be run again.
    run("pellucid", "sft", "@", str(HERE / "sft.toml"), "--seed", seed, "--clean-output-dir")
    run("pellucid", "rl", "@", str(HERE / "rl.toml"), "--seed", seed, "--clean-output-dir")
    metrics = read_metrics(OUTPUTS / "rl" / "metrics" / "orchestrator.jsonl")
    rewards = [record["reward/all"] for record in metrics]
    show_rollouts("Before: rollouts of the first step", 0)
    show_rollouts("After: rollouts of the last step", len(rewards) - 1)
    run("pellucid", "ledger", str(OUTPUTS / "rl"))
    run("pellucid", "view", str(OUTPUTS / "rl"), "-o", str(OUTPUTS / "page.html"))
    first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
    console.print(f"\nreward {first:.2f} → {last:.2f} in {time.monotonic() - started:.0f} s", style="bold")
    console.print(f"open {OUTPUTS / 'page.html'} in a browser to see every token")


if __name__ == "__main__":
    main()
