"""A run on a bad day: every process is killed once, Ctrl-C, a batch that rots on disk; each time `--resume`.

In the end no step is missing or double, and every token is accounted for, also those that died.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pellucid.ledger import Report, reconcile
from pellucid.metrics import read_metrics
from pellucid.transport import stable_steps

STEPS = 25
VICTIMS = ("inference", "orchestrator", "trainer", "ctrl-c", "launcher")
pytestmark = pytest.mark.slow


def command(model, folder, *flags):
    evaluation = {"id": "reverse-text", "name": "held-out", "interval": 10, "num_examples": 4}
    return [
        *(sys.executable, "-m", "pellucid.cli", "rl"),
        *("--model.name", str(model), "--output-dir", str(folder), "--max-steps", str(STEPS)),
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


def pid_of(run: subprocess.Popen[str], process: str) -> int:
    pattern = f"pellucid.cli {process}"
    found = subprocess.run(["pgrep", "-P", str(run.pid), "-f", pattern], capture_output=True, text=True)
    return int(found.stdout)


def strike(run: subprocess.Popen[str], victim: str) -> None:
    if victim == "ctrl-c":
        run.send_signal(signal.SIGINT)
    elif victim == "launcher":
        run.kill()
    else:
        os.kill(pid_of(run, victim), signal.SIGKILL)


def trains_beyond_its_checkpoint(run: subprocess.Popen[str], folder) -> bool:
    """Stops the trainer; lets it go on where its newest checkpoint holds every step that it has logged."""
    pid = pid_of(run, "trainer")
    os.kill(pid, signal.SIGSTOP)
    if max(steps_of(folder, "trainer")) >= max(stable_steps(folder / "checkpoints"), default=0):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def run_until(model, folder, victim, until, *flags) -> str:
    """The output of a run that is struck once the trainer has logged step `until`.

    The launcher is struck between two checkpoints, so that there is something to roll back.
    """
    run = subprocess.Popen(
        command(model, folder, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while max(steps_of(folder, "trainer"), default=-1) < until or (
            victim == "launcher" and not trains_beyond_its_checkpoint(run, folder)
        ):
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.02)
        strike(run, victim)
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
    resumed = subprocess.run(command(tiny_model, folder, "--resume"), capture_output=True, text=True)
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
