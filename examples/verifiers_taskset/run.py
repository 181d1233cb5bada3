"""A model learns a taskset of verifiers, in about two minutes on a laptop.

    pip install 'pellucid[verifiers]'
    python examples/verifiers_taskset/run.py

makes and warms up a tiny model with the parts of examples/reverse_text, then trains it on reverse_words.py.
"""

import os
import subprocess
import sys
from pathlib import Path

from pellucid.metrics import read_metrics

HERE = Path(__file__).parent
REVERSE_TEXT = HERE.parent / "reverse_text"
OUTPUTS = Path("outputs/verifiers_taskset")


def run(*arguments: str) -> None:
    print(f"\n$ python {' '.join(arguments)}", flush=True)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    if finished.returncode:
        sys.exit(finished.returncode)


def main() -> None:
    run(str(REVERSE_TEXT / "prepare.py"), str(OUTPUTS))
    places = {
        "--output-dir": OUTPUTS / "sft",
        "--model.name": OUTPUTS / "model",
        "--data.path": OUTPUTS / "warmup.jsonl",
    }
    flags = [word for flag, path in places.items() for word in (flag, str(path))]
    # The example may be run again.
    run("-m", "pellucid.cli", "sft", "@", str(REVERSE_TEXT / "sft.toml"), *flags, "--clean-output-dir")
    run("-m", "pellucid.cli", "rl", "@", str(HERE / "rl.toml"), "--clean-output-dir", *sys.argv[1:])
    run("-m", "pellucid.cli", "ledger", str(OUTPUTS / "rl"))
    rewards = [each["reward/all"] for each in read_metrics(OUTPUTS / "rl" / "metrics" / "orchestrator.jsonl")]
    first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
    print(f"\nreward {first:.2f} → {last:.2f}")


if __name__ == "__main__":
    main()
