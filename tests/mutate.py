"""Plants small faults between the rollout and the weights, one at a time, and reports which go unnoticed.

    python tests/mutate.py --sample 200 --into outputs/mutants.jsonl     # hours; goes on where it was stopped
    python tests/mutate.py --into outputs/mutants.jsonl --report         # what it has found so far
    python tests/mutate.py --list | wc -l                                # all mutants

A mutant is a copy of the package with one change; `mutants.py` makes them. For each, the commands that users
have are asked: a run of six steps, `ledger` and `replay` of it, `verify`. The run has one slot, one thread
and no asynchrony, so that it is the same each time, bit by bit: a mutant that leaves its weights, its
exported tokens and its ledger as they were, and that no command complains about, had no effect
and does not count. With `--suite` the tests of the mutant's package are asked as well, and counted apart.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from mutants import Mutant, all_mutants

ROOT = Path(__file__).parents[1]
NO_EFFECT, SURVIVED = "no effect", "survived"
RUN_TIMEOUT_S, CHECK_TIMEOUT_S = 120.0, 300.0
CONFIG = """
output_dir = "{folder}/run"
max_steps = 6
max_async_level = 0
seq_len = 256
[model]
name = "{folder}/model"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
max_inflight_rollouts = 8
[[orchestrator.env]]
id = "reverse-text"
[orchestrator.sampling]
max_tokens = 8
[inference]
max_concurrent = 1
threads = 1
[trainer]
threads = 1
[trainer.optim]
lr = 1e-3
[trainer.experimental.token_export]
"""


# One mutant before the commands that users have


def judge(folder: Path) -> dict[str, Any]:
    """Which command complains, and what the run left behind; pellucid is the copy that Python finds."""
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    config, run = str(folder / "config.toml"), str(folder / "run")
    commands: list[tuple[str, list[str], float]] = [
        ("rl", ["rl", "@", config], RUN_TIMEOUT_S),
        ("ledger", ["ledger", run], CHECK_TIMEOUT_S),
        ("replay", ["replay", run], CHECK_TIMEOUT_S),
        ("verify", ["verify", "@", config], CHECK_TIMEOUT_S),
    ]
    for name, arguments, timeout_s in commands:
        command = warm.start(arguments, cwd=folder, merged=True)
        try:
            code: int | str = command.wait(timeout_s)
        except TimeoutError:
            code = "hangs"
        finally:
            command.kill()
        if code != 0:
            output = [] if code == "hangs" else command.communicate()[0].strip().splitlines()
            return {"verdict": name, "code": code, "output": output[-12:]}
    return {"verdict": SURVIVED, "effect": fingerprint(folder / "run")}


def fingerprint(run: Path) -> str:
    """A digest of the trained weights, the exported tokens and the books."""
    digest = hashlib.sha256()
    for pattern in ("weights/step_*/*.safetensors", "token_exports/step_*/*.jsonl"):
        for path in sorted(run.glob(pattern)):
            digest.update(path.read_bytes())
    states: Counter[str] = Counter()
    for path in sorted(run.glob("ledger/*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            states.update({f"{path.stem}/{name}": count for name, count in entry.get("counts", {}).items()})
    digest.update(json.dumps(sorted(states.items())).encode())
    return digest.hexdigest()


@dataclass(slots=True)
class Laboratory:
    """A copy of the package in which one module at a time is another."""

    folder: Path
    suite: bool

    def __post_init__(self) -> None:
        shutil.copytree(ROOT / "src", self.folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        from pellucid.model.tiny import make_tiny_model

        make_tiny_model(self.folder / "model", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)

    def try_out(self, mutant: Mutant | None) -> dict[str, Any]:
        path = self.folder / "src" / "pellucid" / (mutant.file if mutant else "__init__.py")
        original = path.read_text()
        try:
            if mutant:
                path.write_text(mutant.source)
            found = self._ask_commands()
            if self.suite and mutant:
                found["suite"] = self._ask_suite(mutant)
        finally:
            path.write_text(original)
        return found

    def _ask_commands(self) -> dict[str, Any]:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        answer = self._python(str(Path(__file__)), "--judge", str(self.folder))
        if answer.returncode != 0:  # the package cannot even be imported
            return {"verdict": "import", "output": answer.stderr.strip().splitlines()[-3:]}
        found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return found

    def _ask_suite(self, mutant: Mutant) -> str:
        tests = ROOT / "tests" / mutant.file.split("/")[0]
        answer = self._python("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(tests))
        return "passed" if answer.returncode == 0 else "failed"

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


# All of them


def examine(mutants: Sequence[Mutant], into: Path, suite: bool) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    known = {line["name"] for line in read(into)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, into.open("a") as file:
        laboratory = Laboratory(Path(folder), suite)
        unchanged = laboratory.try_out(None)
        if unchanged["verdict"] != SURVIVED or laboratory.try_out(None) != unchanged:
            raise SystemExit(f"the package as it is fails, or is not the same twice: {unchanged}")
        for number, mutant in enumerate(mutants, 1):
            if mutant.name in known:
                continue
            began = time.monotonic()
            found = laboratory.try_out(mutant)
            if found["verdict"] == SURVIVED and found.pop("effect") == unchanged["effect"]:
                found["verdict"] = NO_EFFECT
            facts = {"name": mutant.name, "file": mutant.file, "kind": mutant.kind}
            file.write(json.dumps({**facts, **found}) + "\n")
            file.flush()
            seconds = time.monotonic() - began
            print(
                f"{number}/{len(mutants)} {seconds:4.0f} s  {found['verdict']:<10} {mutant.name}", flush=True
            )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(lines: Sequence[dict[str, Any]]) -> str:
    verdicts = Counter(line["verdict"] for line in lines)
    counted = len(lines) - verdicts[NO_EFFECT]
    caught = counted - verdicts[SURVIVED]
    suites = Counter(line["suite"] for line in lines if "suite" in line)
    return "\n".join(
        [
            f"{len(lines)} mutants, {verdicts[NO_EFFECT]} without an effect",
            f"caught by the commands: {caught} of {counted} ({caught / max(counted, 1):.1%})",
            *(f"  {verdict:<10} {count}" for verdict, count in verdicts.most_common()),
            *([f"caught by the tests: {suites['failed']} of {suites.total()}"] if suites else []),
            *(f"survives: {line['name']}" for line in lines if line["verdict"] == SURVIVED),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("outputs/mutants.jsonl"), help="a line per mutant")
    parser.add_argument("--only", default="", help="the files whose name contains this")
    parser.add_argument("--sample", type=int, help="so many of the mutants, chosen by --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", action="store_true", help="ask the tests of the mutant's package, too")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("--report", action="store_true", help="print what is in --into and try none")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.judge:
        print(json.dumps(judge(chosen.judge)))
        return
    if not chosen.report:
        mutants = [mutant for mutant in all_mutants(ROOT / "src" / "pellucid") if chosen.only in mutant.file]
        if chosen.sample is not None:
            mutants = random.Random(chosen.seed).sample(mutants, min(chosen.sample, len(mutants)))
        if chosen.list:
            print("\n".join(mutant.name for mutant in mutants))
            return
        examine(mutants, chosen.into, chosen.suite)
    print(report(read(chosen.into)))


if __name__ == "__main__":
    main()
