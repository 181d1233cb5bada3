"""A run on a bad day: every process is killed once, Ctrl-C, a batch that rots on disk; each time `--resume`.

In the end no step is missing or double, and every token is accounted for, also those that died.
"""

import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

import warm
from pellucid.ledger import Report, Stage, reconcile
from pellucid.metrics import read_metrics
from pellucid.orchestrator.snapshot import read_snapshot
from pellucid.transport import stable_steps

STEPS = 25
VICTIMS = ("inference", "orchestrator", "trainer", "ctrl-c", "launcher")
pytestmark = pytest.mark.slow


def command(model, folder, *flags):
    evaluation = {"id": "reverse-text", "name": "held-out", "interval": 10, "num_examples": 4}
    return [
        *("rl", "--model.name", str(model), "--output-dir", str(folder), "--max-steps", str(STEPS)),
        *("--seq-len", "256", "--orchestrator.env", '[{"id": "reverse-text"}]'),
        *("--orchestrator.eval", json.dumps([evaluation])),
        *("--orchestrator.batch-size", "16", "--orchestrator.sampling.max-tokens", "8"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.max-inflight-rollouts", "16"),
        *("--trainer.experimental.token-export", "--trainer.ckpt.interval", "3"),
        *flags,
    ]


def records_of(folder, process):
    return list(read_metrics(folder / "metrics" / f"{process}.jsonl"))


def steps_of(folder, process):
    return [record["step"] for record in records_of(folder, process)]


def strike(run: warm.Running, folder, victim: str) -> None:
    if victim == "ctrl-c":
        run.send_signal(signal.SIGINT)
    elif victim == "launcher":
        run.kill()
    else:
        os.kill(warm.processes_of(folder)[victim], signal.SIGKILL)


def is_stopped_with_something_to_lose(folder, victim: str) -> bool:
    """Stops the process whose death should cost something, and lets it go on if that would cost nothing.

    While the orchestrator stands still, the engine delivers what it is sampling: a second is enough.
    """
    if victim not in LOSSES:
        return True
    process, would_lose = LOSSES[victim]
    pid = warm.processes_of(folder)[process]
    os.kill(pid, signal.SIGSTOP)
    for _ in range(50):
        if would_lose(folder):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGCONT)
    return False


def trained_beyond_its_checkpoint(folder) -> bool:
    return max(steps_of(folder, "trainer")) >= max(stable_steps(folder / "checkpoints"), default=0)


def received_what_it_has_not_saved(folder) -> bool:
    """The engine has delivered tokens that neither the orchestrator's journal nor its snapshot knows."""
    books, snapshot = reconcile(folder / "ledger").stages, read_snapshot(folder)
    held = snapshot.held().total() if snapshot else 0
    return books[Stage.INFERENCE]["delivered"] > books[Stage.ORCHESTRATOR]["received"] + held


LOSSES = {
    "orchestrator": ("orchestrator", received_what_it_has_not_saved),
    "launcher": ("trainer", trained_beyond_its_checkpoint),
}


def run_until(model, folder, victim, until, *flags) -> str:
    """The output of a run that is struck once it has trained step `until`.

    The orchestrator is struck while tokens are on their way to it, so that they are lost; the launcher
    between two checkpoints, so that there is something to roll back.
    """
    run = warm.start(command(model, folder, *flags), merged=True)
    try:
        warm.wait_for_step(run, folder, until)
        while not is_stopped_with_something_to_lose(folder, victim):
            warm.wait_for_step(run, folder, until)
        strike(run, folder, victim)
        output, _ = run.communicate()
    finally:
        run.kill()
    return output


@dataclass
class Day:
    folder: object
    outputs: dict[str, str] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    last_output: str = ""


@pytest.fixture(scope="module")
def day(tiny_model, tmp_path_factory) -> Day:
    folder = tmp_path_factory.mktemp("bad-day") / "run"
    day = Day(folder)
    for number, victim in enumerate(VICTIMS):
        flags = ["--resume"] if number else []
        day.outputs[victim] = run_until(tiny_model, folder, victim, 4 * number + 4, *flags)
        day.reports[victim] = reconcile(folder / "ledger")
    start = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    rotten = folder / "batches" / f"step_{start}" / "batch.bin"
    rotten.write_bytes(rotten.read_bytes()[:100])
    resumed = warm.run(command(tiny_model, folder, "--resume"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    day.last_output = resumed.stdout
    return day


def test_the_launcher_says_who_died_and_where_it_goes_on(day) -> None:
    for victim in ("inference", "orchestrator", "trainer"):
        assert f"{victim} was killed by SIGKILL" in day.outputs[victim]
    for after, victim in pairwise(VICTIMS):
        found = re.search(r"^resuming at step (\d+)", day.outputs[victim], re.MULTILINE)
        assert found is not None and int(found[1]) > 0, after
    assert "lost" not in day.outputs["launcher"].splitlines()[0]  # the one after Ctrl-C
    assert "trained tokens are rolled back" in day.last_output


def test_meanwhile_the_books_are_open_and_balanced(day) -> None:
    for report in day.reports.values():
        assert report.balanced and report.running


def test_no_step_is_missing_or_double(day) -> None:
    for process in ("trainer", "orchestrator"):
        assert steps_of(day.folder, process) == list(range(STEPS))
    assert steps_of(day.folder, "eval") == [0, 10, 20, 25]
    versions = steps_of(day.folder, "inference")
    assert versions == sorted(set(versions))
    exported = [int(path.name.removeprefix("step_")) for path in (day.folder / "token_exports").iterdir()]
    assert sorted(exported) == list(range(STEPS))
    totals = [record["total/loss_tokens"] for record in records_of(day.folder, "trainer")]
    steps = [record["loss_tokens"] for record in records_of(day.folder, "trainer")]
    assert totals == [sum(steps[: step + 1]) for step in range(STEPS)]


def test_every_token_is_accounted_for(day) -> None:
    report = reconcile(day.folder / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
    states = report.states["run", "reverse-text"]
    assert states["lost"] > 0 and states["rolled_back"] > 0 and states["in_flight"] == 0
    trained = sum(record["loss_tokens"] for record in records_of(day.folder, "trainer"))
    assert states["trained"] + states["masked"] == trained


def test_saved_rollouts_tell_the_same_story(day) -> None:
    rollouts = [
        json.loads(line)
        for path in day.folder.glob("rollouts/step_*/train_rollouts.jsonl")
        for line in path.read_text().splitlines()
    ]
    names = [rollout["rollout_id"] for rollout in rollouts]
    assert len(names) == len(set(names))
    states = reconcile(day.folder / "ledger").states["run", "reverse-text"]
    sent = sum(rollout["num_tokens"] for rollout in rollouts if rollout["outcome"] == "sent")
    assert sent == states["trained"] + states["masked"]


def test_the_model_loads(day) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(day.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(day.folder / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
    assert (day.folder / "model" / "generation_config.json").exists()


# The parts of a run, each started on its own and again


class Parts:
    """Trainer, orchestrator and server of one run, without a launcher."""

    def __init__(self, model, folder) -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            self._port = str(door.getsockname()[1])
        self._model = model
        self.folder = folder
        self.running = {}

    def start(self, *names: str) -> None:
        """As Kubernetes does: always with `--resume`."""
        shared = ["--model", "--output-dir", "--seq-len", "--resume", "--inference"]
        own = {
            "inference": [],
            "orchestrator": ["--orchestrator", "--max-steps"],
            "trainer": ["--trainer", "--max-steps"],
        }
        for name in names:
            _, *flags = command(self._model, self.folder, "--resume", "--inference.port", self._port)
            known = shared[:4] if name == "trainer" else shared
            self.running[name] = warm.start([name, *select(flags, [*known, *own[name]])], merged=True)

    def kill(self, *names: str) -> None:
        for name in names:
            self.running[name].kill()
        for name in names:
            self.running.pop(name).wait()

    def wait(self, until: int) -> None:
        """Until the trainer has logged this step."""
        while max(steps_of(self.folder, "trainer"), default=-1) < until:
            for name, part in self.running.items():
                assert part.poll() is None, f"{name}: {part.communicate()[0]}"
            time.sleep(0.02)

    def end(self) -> None:
        for name in ("trainer", "orchestrator"):
            output, _ = self.running[name].communicate()
            assert self.running.pop(name).wait() == 0, output
        self.running["inference"].send_signal(signal.SIGTERM)
        self.running.pop("inference").wait()


def select(flags: list[str], prefixes: list[str]) -> list[str]:
    """Those that a part knows, with their values."""
    kept, keeps = [], False
    for word in flags:
        if word.startswith("--"):
            keeps = word.startswith(tuple(prefixes))
        if keeps:
            kept.append(word)
    return kept


def test_parts_that_are_killed_go_on_alone_and_nothing_is_counted_twice(tiny_model, tmp_path) -> None:
    """One after the other, then two at once, each while the others go on; nobody rewinds the folder."""
    parts = Parts(tiny_model, tmp_path / "run")
    parts.start("inference", "orchestrator", "trainer")
    try:
        for until, names in [
            (4, ["trainer"]),
            (8, ["orchestrator"]),
            (12, ["inference"]),
            (16, ["trainer", "orchestrator"]),
        ]:
            parts.wait(until)
            parts.kill(*names)
            assert reconcile(parts.folder / "ledger").balanced
            parts.start(*names)
        parts.end()
    finally:
        parts.kill(*parts.running)
    report = reconcile(parts.folder / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
    states = report.states["run", "reverse-text"]
    trained = sum(record["loss_tokens"] for record in records_of(parts.folder, "trainer"))
    assert states["trained"] + states["masked"] == trained
    for process in ("trainer", "orchestrator"):
        assert steps_of(parts.folder, process) == list(range(STEPS))
