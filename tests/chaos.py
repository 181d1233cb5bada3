"""Kills, stops and starves the processes of a run at random moments, and checks that nothing went missing.

    python tests/chaos.py --blows 30 --seed 0      (make chaos KILLS=30)

After every blow the books have to balance, and no step is missing or double. In the end every example of the
stream was trained exactly once or stands in the saved rollouts with what became of it.

With `--folder` it goes on where it was, if it was interrupted itself, however that was: blows that were
checked are in `FOLDER/blows.jsonl`. Runs are forks of a Python that has imported everything; `--cold` starts
each as a user does, which takes eight times the CPU time.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import warm
from pellucid.data.files import open_lock, try_lock
from pellucid.launch.run_folder import LOCK
from pellucid.ledger import reconcile
from pellucid.metrics import parse_metrics, read_metrics
from pellucid.model.tiny import make_tiny_model

PARTS = ("inference", "orchestrator", "trainer")
ALL = "all at once"
"""The launcher and all parts, as when the machine dies; but what the system has yet to write is not lost."""

VICTIMS: dict[str, tuple[str, ...]] = {
    "kill": (*PARTS, "launcher", "ctrl-c", ALL),
    "resume": (*PARTS, "launcher", "ctrl-c", ALL),
    "checkpoint": ("trainer", ALL),
    "weights": ("trainer", ALL),
    "hang": (*PARTS, ALL),
    "full disk": (*PARTS, ALL),
}
"""Who may be struck in each way."""

WAYS = ("kill", "kill", "resume", "resume", "checkpoint", "weights", "hang", "full disk")
WRITTEN = {"checkpoint": "checkpoints", "weights": "weights"}
"""Where the trainer writes what a blow of this way interrupts."""

GIVEN_UP = ("lost", "cancelled", "rolled_back")
"""States of tokens that a blow may cost."""

TOLD = {"lost": "sampled tokens were lost", "rolled_back": "trained tokens are rolled back"}
"""How a run that resumes says what became of tokens before it."""

EXIT_CODES = {"full disk": 74, "hang": 130, "ctrl-c": 130, "launcher": -9, ALL: -9}
"""How a run ends after a blow, by way and by victim; 1 after the others."""

START_S = 3.0
"""About how long a start takes, while none is known."""

WRITING_S = 0.01
"""About how long the trainer writes a folder. The blow comes at a random moment of it."""

PATIENCE_S = 600.0
"""When a run hangs that was not told to."""


@dataclass(frozen=True)
class Blow:
    """One strike at a run, and what became of it."""

    way: str
    """`kill`; `checkpoint`, `weights`: the same as the trainer writes one; `resume`: the same before the run
    has trained a new step; `hang`: the victim is stopped for `delay_s` and goes on; `full disk`: no file of
    the victim grows any more."""

    victim: str
    delay_s: float
    resumed_s: float | None = None
    """From the start of the run until it trained a new step; None if it was struck before."""

    ended_s: float | None = None
    """From the blow until the run had ended; None after a hang, which the run survives."""

    resumed: str = ""
    """What the run said as it resumed; empty if it is new, or was struck before it could."""

    given_up: dict[str, int] = field(default_factory=dict)
    """Tokens by `GIVEN_UP`, from the beginning of the run on, as its books say it after the blow."""

    @property
    def name(self) -> str:
        return f"{self.way}, {self.victim}"


def draw(seed: int, number: int, start_s: float) -> Blow:
    generator = random.Random(f"{seed} {number}")
    way = generator.choice(WAYS)
    longest_s = {"resume": start_s, "kill": 3.0, "hang": 5.0}.get(way, WRITING_S)
    return Blow(way, generator.choice(VICTIMS[way]), generator.uniform(0, longest_s))


def start_cold(arguments: list[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pellucid.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


start_warm = partial(warm.start, merged=True)


def arguments_of(folder: Path, max_steps: int) -> list[str]:
    return [
        *("rl", "--resume", "--model.name", str(folder / "tiny"), "--output-dir", str(folder / "run")),
        *("--max-steps", str(max_steps), "--seq-len", "256", "--trainer.ckpt.interval", "4"),
        *("--orchestrator.env", '[{"id": "reverse-text"}]', "--orchestrator.batch-size", "16"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.max-inflight-rollouts", "24"),
        *("--orchestrator.sampling.max-tokens", "8", "--trainer.experimental.token-export"),
    ]


def poll(run: Any, is_over: Callable[[], bool], every_s: float = 0.05) -> None:
    """Waits while the run goes on; one that ends or hangs is at fault."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_over():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(every_s)


def wait_for_new_step(run: Any, folder: Path, before: int) -> None:
    poll(run, lambda: num_steps(folder) > before)


def strike(run: Any, folder: Path, blow: Blow) -> bool:
    """False if there was nobody to strike."""
    found = warm.processes_of(folder)
    pids = [pid for name, pid in found.items() if blow.victim in (name, "launcher", ALL)]
    if blow.victim == "ctrl-c":
        run.send_signal(signal.SIGINT)
        return True
    if blow.way == "full disk":
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif blow.way == "hang":
        signal_groups(pids, signal.SIGSTOP)
        time.sleep(blow.delay_s)
        signal_groups(pids, signal.SIGCONT)
    elif blow.victim == "launcher":
        run.kill()
        return True
    else:
        signal_groups(pids, signal.SIGSTOP)  # none sees another die
        if blow.victim == ALL:
            run.kill()
        signal_groups(pids, signal.SIGKILL)
        return blow.victim == ALL or bool(pids)
    return bool(pids)


def signal_groups(pids: Iterable[int], number: int) -> None:
    """Signals processes, and those that they have started."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)


def strike_writer(run: Any, folder: Path, blow: Blow) -> None:
    """Strikes as the trainer writes a folder. A blow that comes too late is taken back, and the next comes
    sooner after the folder is begun."""
    parent = folder / WRITTEN[blow.way]

    def is_half_written() -> bool:
        return any(parent.glob(".*.partial*"))

    delay_s, pids = blow.delay_s, ()
    while not is_half_written():
        signal_groups(pids, signal.SIGCONT)
        poll(run, is_half_written, every_s=0.0005)
        time.sleep(delay_s)
        pids = [pid for name, pid in warm.processes_of(folder).items() if name == "trainer"]
        signal_groups(pids, signal.SIGSTOP)
        delay_s /= 2
    strike(run, folder, blow)


def suffer(run: Any, folder: Path, blow: Blow, before: int) -> Blow:
    """Strikes a run that was just started, and waits for its end; returns the blow as it was."""
    started = time.monotonic()
    if blow.way != "resume":
        wait_for_new_step(run, folder, before)
        blow = replace(blow, resumed_s=time.monotonic() - started)
    if blow.way in WRITTEN:
        strike_writer(run, folder, blow)
    else:
        time.sleep(blow.delay_s if blow.way in ("kill", "resume") else 0.0)
        poll(run, lambda: strike(run, folder, blow))  # it may not have started yet
    ended = time.monotonic()
    if blow.way == "hang":  # nothing may have ended
        wait_for_new_step(run, folder, num_steps(folder))
        run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=PATIENCE_S)[0]
    if blow.way != "resume":  # a run that has hardly begun ends as its Python does
        expected = EXIT_CODES.get(blow.way, EXIT_CODES.get(blow.victim, 1))
        assert run.returncode == expected, f"{blow.name}: exit code {run.returncode}\n{output}"
    said = re.search(r"^resuming at.*$", output, re.MULTILINE)
    resumed = said[0] if said else "new run" if "steps; logs in" in output else ""
    return replace(blow, ended_s=None if blow.way == "hang" else time.monotonic() - ended, resumed=resumed)


def num_steps(folder: Path) -> int:
    """Returns one more than the newest step that the orchestrator has written down."""
    path = folder / "metrics" / "orchestrator.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return int(parse_metrics(str(path), whole.rpartition(b"\n")[2])["step"]) + 1 if whole else 0


def check_steps(folder: Path, process: str) -> int:
    """Returns how many steps there are; none is missing or double."""
    steps = [record["step"] for record in read_metrics(folder / "metrics" / f"{process}.jsonl")]
    assert steps == list(range(len(steps))), f"{process}: {steps}"
    return len(steps)


def check_books(folder: Path) -> dict[str, int]:
    """Returns the tokens that the run has given up so far, by `GIVEN_UP`."""
    for process in ("trainer", "orchestrator"):
        check_steps(folder, process)
    if not any(path.stat().st_size for path in (folder / "ledger").glob("*.jsonl")):
        return {}
    report = reconcile(folder / "ledger")
    assert report.balanced, report.differences
    return {state: sum(states[state] for states in report.states.values()) for state in GIVEN_UP}


def check_run(folder: Path, max_steps: int) -> Counter[str]:
    for process in ("trainer", "orchestrator"):
        assert check_steps(folder, process) == max_steps, process
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


def end_leftovers(folder: Path) -> None:
    """Ends the run that goes on in a folder since whoever struck it was killed."""
    if (folder / LOCK).exists():
        signal_groups(warm.processes_of(folder).values(), signal.SIGKILL)
        with open_lock(folder / LOCK) as lock:
            while not try_lock(lock):
                time.sleep(0.1)


def rampage(
    folder: Path,
    num_blows: int,
    choose: Callable[[int, float], Blow],
    start: Callable[[list[str]], Any] = start_warm,
) -> dict[str, int]:
    """Strikes so often, finishes the run, and returns the states of its tokens; raises if one is missing.

    `choose` returns the blow of a number, given how long a start takes.
    """
    if not (folder / "tiny").exists():
        make_tiny_model(folder / "tiny", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    end_leftovers(folder / "run")
    max_steps = 1_000_000  # until the last blow
    while (number := len(blows := struck(folder))) < num_blows:
        known_s = [blow.resumed_s for blow in blows if blow.resumed_s is not None]
        blow = choose(number, statistics.median(known_s or [START_S]))
        before = num_steps(folder / "run")
        run = start(arguments_of(folder, max_steps))
        try:
            blow = suffer(run, folder / "run", blow, before)
        finally:
            run.kill()
        blow = replace(blow, given_up=check_books(folder / "run"))
        with (folder / "blows.jsonl").open("a") as file:
            file.write(json.dumps(asdict(blow)) + "\n")
        print(f"blow {number + 1:4d}  {blow.name:<24} {blow.delay_s:3.2f} s; {blow.resumed}", flush=True)
    num_done = num_steps(folder / "run")
    last = start(arguments_of(folder, num_done + 5))
    output = last.communicate()[0]
    assert last.returncode == 0, output
    print(output)
    return check_run(folder / "run", num_done + 5)


def costs(blows: list[Blow], states: dict[str, int]) -> Iterator[tuple[Blow, dict[str, int], float | None]]:
    """Yields each blow, the tokens by state that it cost, and the seconds until the next run had a new step.

    What died with a process is known as the next run resumes. That one may be struck before it has: then the
    last blow is meant that struck a run which sampled.
    """
    cost: dict[int, Counter[str]] = defaultdict(Counter)
    guilty = 0
    before: dict[str, int] = {}
    for number, blow in enumerate(blows):
        grown = Counter({state: blow.given_up.get(state, 0) - before.get(state, 0) for state in GIVEN_UP})
        told = Counter({state: count_in(blow.resumed, words) for state, words in TOLD.items()})
        cost[guilty].update(told if blow.resumed else grown)
        if blow.resumed:
            guilty = number
            grown.subtract(told)
            cost[number].update(grown)
        before = blow.given_up
    cost[guilty].update({state: states.get(state, 0) - before.get(state, 0) for state in GIVEN_UP})
    following = [blow.resumed_s for blow in blows[1:]]
    for number, (blow, resumed_s) in enumerate(zip(blows, [*following, None], strict=True)):
        yield blow, cost[number], resumed_s


def count_in(line: str, words: str) -> int:
    found = re.search(rf"([\d,]+) {words}", line)
    return int(found[1].replace(",", "")) if found else 0


def table(blows: list[Blow], states: dict[str, int]) -> str:
    """Returns a Markdown table: what blows of each kind cost in tokens and time."""
    rows = defaultdict(list)
    for blow, cost, resumed_s in costs(blows, states):
        rows[blow.way, blow.victim].append((blow.ended_s, resumed_s, *(cost[state] for state in GIVEN_UP)))
    lines = [
        "| way | victim | blows | run had ended: median, longest | new step after the next start | "
        + " | ".join(f"{state}, tokens a blow" for state in GIVEN_UP)
        + " |",
        "|---" * 2 + "|--:" * (3 + len(GIVEN_UP)) + "|",
    ]
    for (way, victim), row in sorted(rows.items()):
        ended, resumed, *tokens = zip(*row, strict=True)
        cells = [way, victim, f"{len(row)}", spread(ended), spread(resumed)]
        lines.append(f"| {' | '.join([*cells, *(f'{statistics.mean(each):.1f}' for each in tokens)])} |")
    return "\n".join(lines)


def spread(times: Iterable[float | None]) -> str:
    known = [each for each in times if each is not None]
    return f"{statistics.median(known):.1f} s, {max(known):.1f} s" if known else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blows", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run is; one of its own by default")
    parser.add_argument("--cold", action="store_true", help="start each process as a user does")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background it is ignored, and by the run
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="pellucid-chaos-"))
    print(f"the run is in {folder}", flush=True)
    start = start_cold if arguments.cold else start_warm
    states = rampage(folder, arguments.blows, partial(draw, arguments.seed), start)
    print(table(struck(folder), states))
    print(f"{arguments.blows} blows, {num_steps(folder / 'run'):,} steps, tokens: {dict(states)}")


if __name__ == "__main__":
    main()
