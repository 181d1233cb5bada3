"""Time to learn a task, beside another trainer: the same weights, examples, budget and machine.

    python -m benchmarks.peers                 the demo's task until the reward is 0.9, on three seeds
    python -m benchmarks.peers smollm          steps per minute of SmolLM2-135M on a task of reasoning-gym

One run after the other, ours and theirs by turns, each with both cores. First TRL's settings are tried out,
a few steps each; those that look best run to the target on the first seed, and the one that gets there first
takes part on the others. Every run is written to outputs/peers/TASK.json as it ends, and one that is there is
not run again (`--fresh` forgets them), so that a race which was stopped goes on. Each time, the page, the
picture, README's sentence and benchmarks/peers.json are made anew.

The clock of a run starts when it begins to sample, with everything loaded; how long the loading took is told
beside it. So is what else the machine did meanwhile.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from benchmarks.curve import Curve, Work, watching_load
from benchmarks.peers_page import OURS, THEIRS, TRIAL, publish, step_s, told, winner
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


@dataclass(frozen=True, slots=True)
class Results:
    """The runs of a race so far, in a file."""

    path: Path
    curves: list[Curve]

    @classmethod
    def open(cls, path: Path) -> "Results":
        found = json.loads(path.read_text()) if path.exists() else []
        return cls(path, [Curve.from_dict(each) for each in found])

    def find(self, name: str, seed: int, setting: str = "") -> Curve | None:
        return next((c for c in self.curves if (c.name, c.seed, c.setting) == (name, seed, setting)), None)

    def add(self, curve: Curve) -> None:
        self.curves.append(curve)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps([each.as_dict() for each in self.curves]))


def warm_up() -> Path:
    """The checkpoint that all start from: the demo's model after its supervised warm-up."""
    model = OUTPUTS / "sft" / "model"
    if not model.is_dir():
        example = Path("examples/reverse_text")
        run([sys.executable, str(example / "prepare.py"), str(OUTPUTS)])
        run(
            [
                *(sys.executable, "-m", "pellucid.cli", "sft", "@", str(example / "sft.toml")),
                *("--model.name", str(OUTPUTS / "model"), "--data.path", str(OUTPUTS / "warmup.jsonl")),
                *("--output-dir", str(OUTPUTS / "sft"), "--clean-output-dir"),
            ]
        )
    return model


def smollm() -> Path:
    model = Path("outputs/smollm/model")
    if not model.is_dir():
        sys.exit(f"{model} is not there; make it with python examples/smollm/prepare.py outputs/smollm")
    return model


IN_FLIGHT_256 = ("--orchestrator.max-inflight-rollouts", "256", "--inference.max-concurrent", "256")
"""Makes larger batches for the engine, and samples that are a little older."""

RACES = {
    "reverse_text": Race(
        "reverse_text",
        "benchmarks/peers.toml",
        warm_up,
        target=0.9,
        num_steps=1000,
        ours=[
            ("pellucid", "128 rollouts in flight", ()),
            ("pellucid", "256 rollouts in flight", IN_FLIGHT_256),
        ],
        trials=[
            TrlSettings(threads=1),
            TrlSettings(threads=2),
            TrlSettings(threads=1, steps_per_generation=3),
            TrlSettings(threads=2, steps_per_generation=3),
        ],
        trial_steps=18,
    ),
    "smollm": Race(
        "smollm",
        "benchmarks/peers_smollm.toml",
        smollm,
        target=None,
        num_steps=15,
        ours=[
            ("pellucid", "", ()),
            (
                "pellucid, vLLM samples",
                "",
                ("--inference.backend", "vllm", "--inference.python", ".venv-vllm/bin/python"),
            ),
        ],
        trials=[TrlSettings(threads=1), TrlSettings(threads=2)],
        trial_steps=2,
    ),
}


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


def candidates(trials: Sequence[tuple[TrlSettings, Curve]], has_target: bool) -> list[TrlSettings]:
    """Settings that run in full: the fastest of all, the fastest on-policy, and that with two iterations.

    Samples that are a few steps old, or train twice, may teach less: the fastest step is not the fastest
    to learn. Without a target the fastest step is all that counts.
    """
    by_speed = [settings for settings, _ in sorted(trials, key=lambda trial: step_s(trial[1]))]
    if not has_target:
        return by_speed[:1]
    on_policy = next(settings for settings in by_speed if settings.steps_per_generation == 1)
    return list(dict.fromkeys([by_speed[0], on_policy, replace(on_policy, num_iterations=2)]))


def race_on(
    race: Race, results: Results, seeds: Sequence[int], max_s: float, show: Callable[[], None]
) -> None:
    model = race.model()

    def once(name: str, seed: int, setting: str, train: Callable[[], Curve]) -> Curve:
        curve = results.find(name, seed, setting)
        if curve is None:
            curve = replace(train(), setting=setting)
            results.add(curve)
            show()
        print(told(curve, race.target), flush=True)
        return curve

    def ours(name: str, setting: str, flags: Sequence[str], seed: int) -> Curve:
        train = partial(train_with_pellucid, race, name, flags, model, seed, max_s)
        return once(name, seed, setting, train)

    def theirs(settings: TrlSettings, seed: int, limit_s: float = max_s) -> Curve:
        return once("TRL", seed, str(settings), lambda: train_with_trl(race, settings, model, seed, limit_s))

    def tried(settings: TrlSettings) -> Curve:
        short = replace(race, target=None, num_steps=min(race.trial_steps, 2 * race.num_steps))
        return once(
            "TRL",
            seeds[0],
            f"{TRIAL}{settings}",
            lambda: train_with_trl(short, settings, model, seeds[0], max_s),
        )

    first, *others = race.ours
    runs = [ours(*first, seeds[0])]
    trials = [(settings, tried(settings)) for settings in race.trials]
    limit_s, full = max_s, candidates(trials, race.target is not None)
    for settings, other in zip_longest(full, others):  # by turns
        if settings is not None:
            runs.append(theirs(settings, seeds[0], limit_s))
            if race.target is not None and (reached := runs[-1].reached(race.target)) is not None:
                limit_s = min(limit_s, reached[0])
        if other is not None:
            runs.append(ours(*other, seeds[0]))
    if race.target is None or not seeds[1:]:
        return
    our_best, their_best = (winner(runs, race.target, name) for name in (OURS, THEIRS))
    for seed in seeds[1:]:
        ours(*next((each for each in race.ours if each[1] == our_best), first), seed)
        theirs(next((each for each in full if str(each) == their_best), full[0]), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a task with pellucid and with TRL.")
    parser.add_argument("task", choices=list(RACES), nargs="?", default="reverse_text")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int, help="a run is over after so many steps, for a rehearsal")
    parser.add_argument("--max-s", type=float, default=300, help="a run is stopped after so long")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are there")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    race = RACES[options.task]
    path = OUTPUTS / f"{race.task}.json"
    if options.steps:
        race, path = replace(race, num_steps=options.steps), OUTPUTS / f"{race.task}_rehearsal.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    results = Results.open(path)
    seeds = options.seeds or ([0, 1, 2] if race.target is not None else [0])

    def show() -> None:
        if not options.steps:
            publish(race.task, results.curves, race.target)

    race_on(race, results, seeds, options.max_s, show)


if __name__ == "__main__":
    main()
