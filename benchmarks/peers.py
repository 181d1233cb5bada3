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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from benchmarks.curve import Curve
from benchmarks.peers_page import OURS, THEIRS, TRIAL, publish, step_s, told, winner
from benchmarks.peers_sides import OUTPUTS, Race, TrlSettings, run, train_with_pellucid, train_with_trl


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

    def ours(side: tuple[str, str, Sequence[str]], seed: int) -> Curve:
        name, setting, flags = side
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
    runs = [ours(first, seeds[0])]
    trials = [(settings, tried(settings)) for settings in race.trials]
    limit_s, full = max_s, candidates(trials, race.target is not None)
    for settings, other in zip_longest(full, others):  # by turns
        if settings is not None:
            runs.append(theirs(settings, seeds[0], limit_s))
            if race.target is not None and (reached := runs[-1].reached(race.target)) is not None:
                limit_s = min(limit_s, reached[0])
        if other is not None:
            runs.append(ours(other, seeds[0]))
    if race.target is None or not seeds[1:]:
        return
    our_best, their_best = (winner(runs, race.target, name) for name in (OURS, THEIRS))
    for seed in seeds[1:]:
        ours(next((each for each in race.ours if each[1] == our_best), first), seed)
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
