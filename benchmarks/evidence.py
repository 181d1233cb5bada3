"""SmolLM2-135M learns tasks of reasoning-gym on this machine: `make evidence`.

    prepare → per seed and task: warm-up by sft and base model evaluated, both once per task → rl → page

- A part that has ended well left `PART.usage.json` beside its folder and is not repeated, so that the command
  goes on where it was stopped. A part that was cut short starts anew.
- The page keeps the published figures of a task of which no run is here.
- Warm-up and rl draw from questions of training, evaluations from the others; the environment decides by the
  question's text.
- Every count comes from the rollouts that the runs saved. The page is made from `evidence.json` alone.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence_page import (
    RESULTS,
    Accuracy,
    Evidence,
    KnownResult,
    Point,
    RunResult,
    TaskResult,
    Usage,
    load,
    write_page,
)
from pellucid.config import RLConfig
from pellucid.config.parse import parse
from pellucid.metrics import read_metrics
from pellucid.orchestrator.gym import ReasoningGym

EXAMPLES = Path("examples/evidence")
REVERSE_TEXT = Path("examples/reverse_text_qwen")
OUTPUTS = Path("outputs/evidence")
BASE = Path("outputs/smollm/model")
WARM_UP_STEPS = {"word_reversal": 6, "needle": 4, "chain_sum": 12}
"""The tasks, and steps of their supervised warm-up."""

DEFAULT_TASKS = ["word_reversal", "needle"]

NUM_WARM_UP, WARM_UP_SEED = 3000, 1000
PELLUCID = (sys.executable, "-m", "pellucid.cli")
KNOWN_FILES = ("@", str(REVERSE_TEXT / "rl.toml"), "@", str(REVERSE_TEXT / "smollm.toml"))
KNOWN_COMMAND = (*PELLUCID, "rl", *KNOWN_FILES)
POLL_S = 1.0
FINISHED = "rl_*.usage.json"


@dataclass(frozen=True)
class Part:
    """One command of the queue, and the folder it fills."""

    folder: Path
    command: tuple[str, ...]
    only_evaluates: bool = False
    """Whether it is interrupted once it has evaluated the model that it starts from."""

    @property
    def usage_path(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.usage.json")

    def usage(self) -> Usage:
        return Usage(**json.loads(self.usage_path.read_text()))

    def run(self) -> None:
        """Runs the command unless it ended well before."""
        if self.usage_path.exists():
            print(f"{self.folder} is there", flush=True)
            return
        load, started = os.getloadavg()[0], time.time()
        command = [*self.command, "--output-dir", str(self.folder), "--clean-output-dir"]
        print("$", *command, flush=True)
        process = subprocess.Popen(command, preexec_fn=_take_interrupts)
        try:
            status, used = self._wait(process)
        except KeyboardInterrupt:  # the shell sent it to the process, too
            process.wait()
            sys.exit(f"stopped; the same command goes on with {self.folder}")
        if status != 0 and not self._is_enough():
            sys.exit(f"{self.folder} ended with {status}; see {self.folder / 'logs'}")
        usage = Usage(time.time() - started, used.ru_utime + used.ru_stime, (load, os.getloadavg()[0]))
        self.usage_path.write_text(json.dumps(asdict(usage)))

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, Any]:
        """Returns the exit code, and what the process and its children used."""
        is_told = False
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, used
            if not is_told and self._is_enough():
                os.kill(process.pid, signal.SIGINT)
                is_told = True
            time.sleep(POLL_S)

    def _is_enough(self) -> bool:
        path = self.folder / "metrics" / "eval.jsonl"
        return self.only_evaluates and path.exists() and any(read_metrics(path))


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore them


def warm_up(task: str) -> Part:
    """The task's supervised warm-up; its model is what rl starts from."""
    folder = OUTPUTS / task / "sft"
    data, steps = OUTPUTS / task / "warmup.jsonl", WARM_UP_STEPS[task]
    options = ("--data.path", str(data), "--max-steps", str(steps))
    return Part(folder, (*PELLUCID, "sft", "@", str(EXAMPLES / "sft.toml"), *options))


def write_warm_up(task: str, path: Path) -> None:
    """Writes questions of training with the library's own answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = parse(RLConfig, task_arguments(task), prog="rl").config.orchestrator.env[0]
    environment = ReasoningGym(**env.args, seed=WARM_UP_SEED)
    with path.open("w") as file:
        for index in range(NUM_WARM_UP):
            example = environment.example(index)
            reply = {"role": "assistant", "content": example.info["answer"]}
            file.write(json.dumps({"messages": [*example.messages, reply]}) + "\n")


def task_arguments(task: str) -> list[str]:
    return ["@", str(EXAMPLES / "rl.toml"), "@", str(EXAMPLES / f"{task}.toml")]


def training(task: str, seed: int) -> Part:
    return Part(OUTPUTS / task / f"rl_{seed}", (*PELLUCID, "rl", *task_arguments(task), "--seed", str(seed)))


def base_evaluation(task: str) -> Part:
    """A run of the model before its warm-up, which is interrupted once it has been evaluated."""
    folder = OUTPUTS / task / "base"
    return Part(
        folder, (*PELLUCID, "rl", *task_arguments(task), "--model.name", str(BASE)), only_evaluates=True
    )


def known_result() -> Part:
    return Part(OUTPUTS / "reverse_text" / "rl", KNOWN_COMMAND)


def known_base() -> Part:
    command = (*KNOWN_COMMAND, "--model.name", str(BASE))
    return Part(OUTPUTS / "reverse_text" / "base", command, only_evaluates=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M on tasks of reasoning-gym.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=list(WARM_UP_STEPS), default=DEFAULT_TASKS)
    parser.add_argument("--page", action="store_true", help="only make the page from the runs that are there")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not options.page:
        run_all(options.tasks, options.seeds)
    publish()


def publish() -> None:
    """Makes the page anew from the runs that are here, and from published ones of other tasks."""
    published = load(RESULTS)
    results = {result.task: result for result in published.tasks}
    results |= {task: result_of(task) for task in WARM_UP_STEPS if any((OUTPUTS / task).glob(FINISHED))}
    tasks = [results[task] for task in WARM_UP_STEPS if task in results]
    evidence = Evidence(tasks, known_result_of() or published.known_result)
    RESULTS.write_text(json.dumps(asdict(evidence), indent=1) + "\n")
    write_page(evidence)


def run_all(tasks: Sequence[str], seeds: Sequence[int]) -> None:
    subprocess.run([sys.executable, "examples/smollm/prepare.py", str(BASE.parent)], check=True)
    for seed in seeds:
        for task in tasks:
            part = warm_up(task)
            if not part.usage_path.exists():
                write_warm_up(task, part.folder.with_name("warmup.jsonl"))
            part.run()
            base_evaluation(task).run()
            training(task, seed).run()
            publish()
    if importlib.util.find_spec("reverse_text") is None:
        print("NOTE: the taskset reverse-text is not installed; its run is left out (docs/evidence.md)")
        return
    subprocess.run([sys.executable, str(REVERSE_TEXT / "prepare.py")], check=True)
    known_base().run()
    known_result().run()


def result_of(task: str) -> TaskResult:
    """Reads every seed that was trained, in this call or before."""
    folders = (OUTPUTS / task).glob(FINISHED)
    seeds = sorted(int(path.name.removeprefix("rl_").removesuffix(".usage.json")) for path in folders)
    return TaskResult(
        task=task,
        warm_up_steps=WARM_UP_STEPS[task],
        warm_up=warm_up(task).usage(),
        base=accuracy(base_evaluation(task).folder, 0),
        runs=[run_result(seed, training(task, seed)) for seed in seeds],
    )


def run_result(seed: int, part: Part) -> RunResult:
    before, after = evaluated_versions(part.folder)
    sampled, sent = tokens_of(part.folder)
    return RunResult(
        seed=seed,
        usage=part.usage(),
        before=accuracy(part.folder, before),
        after=accuracy(part.folder, after),
        tokens_sampled=sampled,
        tokens_sent=sent,
        points=list(points_of(part.folder)),
    )


def evaluated_versions(folder: Path) -> tuple[int, int]:
    """Returns the first and the last policy version that was evaluated."""
    versions = [record["step"] for record in read_metrics(folder / "metrics" / "eval.jsonl")]
    return versions[0], versions[-1]


def rollouts_of(folder: Path, step: int, kind: str) -> list[dict[str, Any]]:
    path = folder / "rollouts" / f"step_{step}" / f"{kind}_rollouts.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracy(folder: Path, version: int) -> Accuracy:
    """Counts each held-out question once, however often it was drawn: greedy answers to it are the same."""
    rewards = rewards_of(folder, version)
    return Accuracy(sum(reward == 1.0 for reward in rewards), len(rewards))


def rewards_of(folder: Path, version: int) -> list[float]:
    """Reads the reward of each held-out question; a rollout that failed has none and counts as 0."""
    rollouts = rollouts_of(folder, version, "eval")
    return list(
        {rollout["messages"][-1]["content"]: rollout["reward"] or 0.0 for rollout in rollouts}.values()
    )


def points_of(folder: Path) -> Iterator[Point]:
    """A point per step, over all rollouts that were scored for it: also those of groups without a signal."""
    records = list(read_metrics(folder / "metrics" / "orchestrator.jsonl"))
    first_sampling = records[0]["time"] - records[0]["time/batch_s"]
    for record in records:
        rewards = [
            rollout["reward"]
            for rollout in rollouts_of(folder, record["step"], "train")
            if rollout["reward"] is not None
        ]
        yield Point(
            record["step"], record["time"] - first_sampling, sum(rewards) / len(rewards), len(rewards)
        )


def tokens_of(folder: Path) -> tuple[int, int]:
    """Returns sampled tokens of training rollouts: all of them, and those of rollouts in batches."""
    sampled = sent = 0
    for record in read_metrics(folder / "metrics" / "orchestrator.jsonl"):
        for rollout in rollouts_of(folder, record["step"], "train"):
            sampled += rollout["num_tokens"]
            sent += rollout["num_tokens"] if rollout["outcome"] == "sent" else 0
    return sampled, sent


def known_result_of() -> KnownResult | None:
    part = known_result()
    if not part.usage_path.exists():
        return None
    before, after = evaluated_versions(part.folder)
    sampled, sent = tokens_of(part.folder)
    return KnownResult(
        usage=part.usage(),
        base=rewards_of(known_base().folder, 0),
        before=rewards_of(part.folder, before),
        after=rewards_of(part.folder, after),
        tokens_sampled=sampled,
        tokens_sent=sent,
        points=list(points_of(part.folder)),
    )


if __name__ == "__main__":
    main()
