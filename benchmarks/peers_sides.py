"""The two sides of a race of peers.py, and how a run of each is started, watched and read."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.curve import Curve, Work, watching_load
from pellucid.data.files import step_folders
from pellucid.metrics import read_metrics
from pellucid.transport.batch import decode_batch

OUTPUTS = Path("outputs/peers")
POLL_S = 0.5

Prompts = dict[int, list[int]]
"""Token ids of the prompt of each example, by its index."""


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """What a user of TRL would try out; the number of samples per optimizer step is always the same."""

    threads: int = 2
    steps_per_generation: int = 1
    """Optimizer steps' worth of samples that are generated at once."""

    num_iterations: int = 1
    """Optimizer steps on each sample."""

    def __str__(self) -> str:
        parts = [f"{self.threads} thread" + "s" * (self.threads > 1)]
        if self.steps_per_generation > 1:
            parts.append(f"{self.steps_per_generation} steps per generation")
        if self.num_iterations > 1:
            parts.append(f"{self.num_iterations} iterations")
        return ", ".join(parts)

    @property
    def flags(self) -> list[str]:
        given = asdict(self).items()
        return [part for name, value in given for part in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True, slots=True)
class Race:
    """A task, and what takes part in it."""

    task: str
    file: str
    """Configuration of pellucid, from which TRL's is made."""

    model: Callable[[], Path]
    target: float | None
    num_steps: int
    """A run is over after so many optimizer steps."""

    ours: Sequence[tuple[str, str, Sequence[str]]]
    """(name, setting, flags). With a target, those of one name are tried out in full on the first seed."""

    trials: Sequence[TrlSettings]
    trial_steps: int


def run(command: Sequence[str]) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def train_with_trl(race: Race, settings: TrlSettings, model: Path, seed: int, max_s: float) -> Curve:
    path = OUTPUTS / f"{race.task}_trl.json"
    options = ["--seed", str(seed), "--steps", str(race.num_steps), "--max-s", str(max_s)]
    if race.target is not None:
        options += ["--target", str(race.target)]
    with watching_load() as load:
        run(
            [
                *(sys.executable, "-m", "benchmarks.trl_grpo", race.file, str(model), str(path)),
                *(*options, *settings.flags, "--called", str(time.time())),
            ]
        )
    curve = replace(Curve.load(path), setting=str(settings), **asdict(load))
    theirs = {int(i): ids for i, ids in json.loads(path.with_suffix(".prompts").read_text()).items()}
    curve.num_prompts = require_same_prompts(known_prompts(race.task, seed), theirs)
    return curve


def known_prompts(task: str, seed: int) -> Prompts:
    """Prompts that pellucid trained on in its run of that seed."""
    path = OUTPUTS / f"{task}_{seed}.prompts"
    return {int(i): ids for i, ids in json.loads(path.read_text()).items()}


def require_same_prompts(ours: Prompts, theirs: Prompts) -> int:
    """Returns how many prompts both trained on; ends the race if one of them differs by a token."""
    both = ours.keys() & theirs.keys()
    if differing := [index for index in sorted(both) if ours[index] != theirs[index]]:
        first = differing[0]
        sys.exit(
            f"{len(differing)} of {len(both)} prompts differ, the first that of example {first}: "
            f"{ours[first]} in pellucid, {theirs[first]} in TRL; the race is not fair"
        )
    if not both:
        sys.exit("the two trained on no example in common; the race is not fair")
    return len(both)


def train_with_pellucid(
    race: Race, name: str, flags: Sequence[str], model: Path, seed: int, max_s: float
) -> Curve:
    """`pellucid rl`, interrupted when the task is learned."""
    folder = OUTPUTS / "pellucid"
    command = [
        *(sys.executable, "-m", "pellucid.cli", "rl", "@", race.file, *flags),
        *("--model.name", str(model), "--output-dir", str(folder), "--seed", str(seed), "--clean-output-dir"),
    ]
    print("$", *command, flush=True)
    started = time.time()
    with watching_load() as load:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                curve = curve_of(folder, name, seed, started)
                is_learned = race.target is not None and curve.reached(race.target) is not None
                if is_learned or curve.num_trained >= race.num_steps or curve.trained_s > max_s:
                    break
            else:
                sys.exit(f"pellucid ended with {process.returncode}; see {folder / 'logs'}")
            (OUTPUTS / f"{race.task}_{seed}.prompts").write_text(json.dumps(trained_prompts(folder)))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
    curve = replace(curve_of(folder, name, seed, started, race.num_steps), **asdict(load))
    curve.num_prompts = len(known_prompts(race.task, seed))
    return curve


def trained_prompts(folder: Path) -> Prompts:
    """Prompts of the batches that no checkpoint covers yet, which are all of a run that goes on."""
    prompts: Prompts = {}
    for batch_folder in step_folders(folder / "batches").values():
        table = decode_batch((batch_folder / "batch.bin").read_bytes(), sender="the spool").table
        ids, starts, lengths = table["token_ids"], table.token_offsets, table.prompt_lengths
        for example, start, length in zip(table["example_id"], starts, lengths, strict=False):
            prompts[int(example)] = ids[start : start + length].tolist()
    return prompts


def curve_of(folder: Path, name: str, seed: int, started: float, num_steps: int | None = None) -> Curve:
    """Reads what a run has written so far; `num_steps`: only its first steps."""

    def records(process: str) -> list[dict[str, float]]:
        every = read_metrics(folder / "metrics" / f"{process}.jsonl")
        # Not those of an earlier run, which are about to be deleted.
        return [each for each in every if each["time"] > started][:num_steps]

    scored, trained, sampled = map(records, ("orchestrator", "trainer", "inference"))
    curve = Curve(name, seed)
    if not scored:
        return curve
    first_sampling = scored[0]["time"] - scored[0]["time/batch_s"]
    curve.startup_s = first_sampling - started
    curve.points = [(each["time"] - first_sampling, each["reward/all"]) for each in scored]
    if trained:
        curve.num_trained, curve.trained_s = len(trained), trained[-1]["time"] - first_sampling
    curve.sampling = Work(
        round(sum(each.get("sampled_tokens", 0) for each in sampled)),
        sum(each.get("time/busy_s", 0) for each in sampled),
    )
    curve.training = Work(
        round(sum(each["throughput/trained_tokens_per_s"] * each["time/step_s"] for each in trained)),
        sum(each["time/train_s"] for each in trained),
    )
    return curve
