"""Shows that a refactoring changed no number: two trees do the same runs, which are compared bit by bit.

    python tests/identical.py BASE                BASE: a folder with another checkout, or a git revision
    python tests/identical.py BASE lora experts   these runs only (make identical BASE=… ONLY="lora experts")

Each tree makes its own models and data and runs its own source by its own command line; both take the
settings of this tree. Compared are metrics (losses, rewards, learning rates, gradient norms), the ledger's
totals, every rollout, every column of the token exports, and the final weights. Wall-clock values are left
out.

Seeds decide what is drawn. Timing decides which sequences share a forward, which changes the last bits, and
in which order groups end. `STEADY` leaves it next to nothing: one thread, one sequence at a time in the
engine, no more rollouts in flight than one group has, and no sampling during training. On a busy machine
members of a group can still reach the engine in another order. Differences that begin with a `rollout_id`
look like that: repeat the run on a calm machine.

Prints what differs by name, with its first step and both values, and exits with 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from effects import unclocked

ROOT = Path(__file__).resolve().parents[1]
PELLUCID = ("-m", "pellucid.cli")
SFT = (*PELLUCID, "sft", "@", "TREE/examples/reverse_text/sft.toml", "--trainer.threads", "1")
STEADY = (
    *("--max-async-level", "0", "--trainer.threads", "1", "--inference.threads", "1"),
    *("--inference.max-concurrent", "1", "--orchestrator.max-inflight-rollouts", "8"),
)
AS_JSONL = ("--trainer.experimental.token-export.format", "jsonl")  # read line by line below
RL = (*PELLUCID, "rl", "@", "TREE/examples/reverse_text/rl.toml", *STEADY, *AS_JSONL)
SMALL = (*RL, "--orchestrator.batch-size", "32", "--max-steps", "8")
HELD_OUT = '[{"id": "reverse-text", "name": "held-out", "interval": 4, "num_examples": 8}]'
MAKE_EXPERTS = (
    "from pathlib import Path; from pellucid.model.tiny import make_tiny_moe_model; "
    "make_tiny_moe_model(Path('outputs/moe'), hidden_size=32, dense_layers=[1])"
)
RUNS: dict[str, list[Sequence[str]]] = {
    "sft": [
        ("TREE/examples/reverse_text/prepare.py", "outputs/reverse_text"),
        (*SFT, "--data.validation.num-examples", "64", "--data.validation.interval", "24"),
    ],
    "processes": [
        (*SMALL, "--trainer.num-processes", "2", "--trainer.micro-batch-max-tokens", "512"),
    ],
    "lora": [(*SMALL, "--model.lora.rank", "8", "--orchestrator.eval", HELD_OUT)],
    "experts": [
        ("-c", MAKE_EXPERTS),
        (*SMALL, "--model.name", "outputs/moe", "--trainer.enable-router-replay"),
    ],
    "demo": [(*RL, "--max-steps", "STEPS")],
}
"""Commands of each run, in order; all but the first start from the model that `sft` trains."""

MISSING = "(nothing)"


@contextmanager
def checkout(base: str) -> Iterator[Path]:
    """Gives the folder of BASE; a revision is checked out into a temporary worktree."""
    if Path(base, "src", "pellucid").is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        git, folder = ["git", "-C", str(ROOT), "worktree"], str(Path(place, "base"))
        subprocess.run([*git, "add", "--quiet", "--detach", folder, base], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def run(name: str, tree: Path, place: Path, num_steps: int) -> Path:
    """Does a run with the source of `tree`, in `place`; returns its folder. `num_steps`: of the demo."""
    single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    env = os.environ | single | {"PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"}
    folder = Path("outputs", "reverse_text", name)

    def command(*words: str) -> bytes:
        told = [
            sys.executable,
            *(word.replace("TREE", str(tree)).replace("STEPS", str(num_steps)) for word in words),
        ]
        done = subprocess.run(told, cwd=place, env=env, capture_output=True)
        if done.returncode:
            raise SystemExit(f"{(done.stdout + done.stderr).decode()}\n{tree}: {' '.join(words)} failed")
        return done.stdout

    for words in RUNS[name]:
        command(*words, *(("--output-dir", str(folder)) if words[:2] == PELLUCID else ()))
    books = b"{}"
    if (place / folder / "ledger").is_dir():  # sft has none
        books = command(*PELLUCID, "ledger", str(folder), "--json")
    (place / folder / "ledger.json").write_bytes(books)
    return place / folder


def values(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Gives (name, place, value) of whatever a run wrote down and has to repeat."""
    for kind, pattern in (("metrics", "*.jsonl"), ("rollouts", "*/*.jsonl"), ("token_exports", "*/*.jsonl")):
        for file in sorted((folder / kind).glob(pattern)):
            name, where = (
                (f"metrics/{file.stem}", "") if kind == "metrics" else (kind, f", {file.stem} line ")
            )
            for number, line in enumerate(file.read_text().splitlines()):
                record = json.loads(line)
                place = f"step {record['step']}{where}{number if where else ''}"
                for key, value in unclocked(record).items():
                    if kind == "token_exports" or not is_clocked(key):
                        yield f"{name} {key}", place, value
    for key, value in json.loads((folder / "ledger.json").read_text()).items():
        if key != "weights":  # names of servers, and how many versions they were in time for
            yield f"ledger {key}", "at the end", value
    for file in sorted(folder.glob("model/*.safetensors")):
        for key, tensor in load_file(file).items():
            yield f"weights {key}", "at the end", [tensor.dtype.name, *tensor.shape, tensor.ravel().tolist()]


def is_clocked(metric: str) -> bool:
    """Whether a metric tells of the machine rather than of the run."""
    return metric.split("/")[0] in ("time", "throughput", "memory", "weights") or metric.endswith("time_s")


def differences(base: Path, here: Path) -> tuple[int, list[str]]:
    """Returns how many values are the same in both folders, and a line for each name that differs."""
    before, after = ({each[:2]: each[2] for each in values(folder)} for folder in (base, here))
    num_same, first = 0, dict[str, tuple[int, str]]()
    for name, place in dict.fromkeys([*before, *after]):
        old, new = before.get((name, place), MISSING), after.get((name, place), MISSING)
        if json.dumps(old) == json.dumps(new):
            num_same += 1
            continue
        step = int(place.split(",")[0].removeprefix("step ")) if place.startswith("step") else 0
        if name not in first or step < first[name][0]:
            first[name] = step, f"{name}, {place}: {compare(old, new)}"
    return num_same, [line for _, line in first.values()]


def compare(old: Any, new: Any, where: str = "") -> str:
    """Writes two values that differ; those of lists and objects where they begin to.

    >>> compare([1, [2.0, 3.0]], [1, [2.0, 3.5]])
    '[1][1] is 3.0 in BASE, 3.5 here'
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        key = next(key for key in old if json.dumps(old[key]) != json.dumps(new[key]))
        return compare(old[key], new[key], f"{where}[{key}]")
    was, now = (text if len(text := json.dumps(each)) < 60 else f"{text[:60]}…" for each in (old, new))
    return f"{where} is {was} in BASE, {now} here".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the numbers of two trees bit by bit.")
    parser.add_argument("base", help="folder of another checkout, or a git revision")
    parser.add_argument("only", nargs="*", choices=[*RUNS, []], help="runs; default: all")
    parser.add_argument("--steps", type=int, default=50, help="steps of the demo")
    options = parser.parse_args()
    names = [name for name in RUNS if name == "sft" or not options.only or name in options.only]
    failed = False
    with (
        checkout(options.base) as base,
        tempfile.TemporaryDirectory() as place,
        ThreadPoolExecutor(2) as pool,
    ):
        places = [Path(place, "base"), Path(place, "here")]
        for each in places:
            each.mkdir()
        for name in names:
            folders = list(pool.map(run, [name, name], [base, ROOT], places, [options.steps] * 2))
            num_same, lines = differences(*folders)
            failed |= bool(lines)
            print(f"{name}: {num_same:,} values are the same, {len(lines)} names differ", flush=True)
            print(*(f"    {line}" for line in lines), sep="\n", end="\n" if lines else "", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
