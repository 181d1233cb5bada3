"""`pellucid rl` as a user starts it: three processes, a few steps, and what they leave behind."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import museum
import warm
from pellucid.cli import main
from pellucid.data.alarms import CHANCE, read_alarms
from pellucid.data.files import step_folders
from pellucid.data.tokenizer import load_tokenizer
from pellucid.ledger import reconcile
from pellucid.ledger.weights import read_weights_book
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_hybrid_model
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import weights_folder
from pellucid.viewer.access import RunFolder
from pellucid.viewer.timeline import verdict
from tolerance import logprob_bound, mismatch_kl_bound, near, partial_sum
from warm import processes_of

STEPS = 4
EVAL = {"id": "reverse-text", "name": "held-out", "interval": 2, "num_examples": 6}
SAMPLED = {"temperature": 1.0, "rollouts_per_example": 4, "pass_reward": 0.25, "max_tokens": 6}
pytestmark = pytest.mark.slow


def command(model, folder, *flags):
    return [
        *("rl", "--model.name", str(model), "--output-dir", str(folder), "--max-steps", str(STEPS)),
        *("--seq-len", "256", "--orchestrator.env", '[{"id": "reverse-text"}]'),
        *("--orchestrator.batch-size", "16", "--orchestrator.sampling.max-tokens", "8"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.max-inflight-rollouts", "16"),
        *("--trainer.experimental.token-export", "--trainer.optim.lr", "1e-3"),
        *flags,
    ]


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "demo"
    evaluated = ("--orchestrator.eval", json.dumps([EVAL | SAMPLED]))
    python = [sys.executable, "-m", "pellucid.cli"]
    result = subprocess.run(
        [*python, *command(tiny_model, folder, *evaluated)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def records(folder, step):
    path = folder / "token_exports" / f"step_{step}" / "rank_0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sampled_token_is_accounted_for(finished) -> None:
    folder, output = finished
    report = reconcile(folder / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
    states = report.states["demo", "reverse-text"]
    exported = sum(sum(record["loss_mask"]) for step in range(STEPS) for record in records(folder, step))
    assert states["trained"] + states["masked"] == exported
    assert "balanced: every one of the" in output


def test_an_engine_that_draws_from_its_likeliest_tokens_rings_wherever_one_looks(
    tiny_model, tmp_path
) -> None:
    """It reports the logprobs of all of them; the engine alone has the bug, the other parts have none."""
    bug = next(exhibit for exhibit in museum.read_exhibits() if exhibit.name == "top_8_sampled")
    planted = museum.plant(bug, tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={planted} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "demo"
    result = warm.run(
        [
            *command(tiny_model, folder, "--inference.python", str(python)),
            *("--orchestrator.batch-size", "64", "--orchestrator.rollouts-per-example", "16"),
            *("--orchestrator.max-inflight-rollouts", "64"),
        ]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (alarm,) = (alarm for alarm in read_alarms(folder) if alarm.name == "first_tokens")
    assert alarm.value > alarm.threshold == 0.02 and alarm.p_value < CHANCE
    line = alarm.line()
    assert line.startswith(
        f"ALARM first_tokens at step {alarm.step}: first tokens of a group repeat more often"
    )
    lines = result.stdout.splitlines()
    assert line in lines and line in (folder / "logs" / "rl.log").read_text().splitlines()
    summary = " ".join(" ".join(each.strip("│ ").split()) for each in lines if each.startswith("│"))
    assert f"alarm {line.removeprefix('ALARM ')}" in summary
    ledger = warm.run(["ledger", str(folder)])
    assert ledger.returncode == 0
    _, weights, *rung = ledger.stdout[ledger.stdout.index("balanced: every one of the") :].splitlines()
    assert re.fullmatch(
        r"weights: \d policy versions verified, every tensor as the server serves it", weights
    )
    assert line in rung and all(each.startswith("ALARM ") for each in rung)


@pytest.mark.parametrize(
    ("weights", "lora"),
    [("http", ()), ("http", ("--model.lora.rank", "4")), ("object-store", ())],
    ids=["http", "http, an adapter", "a store"],
)
def test_batches_and_weights_over_the_network_train_as_well_and_resume(
    tiny_model, tmp_path, weights, lora
) -> None:
    flags = ("--transport.type", "zmq", "--transport.compression", "zstd", "--weights.transport", weights)
    if weights == "object-store":
        flags += ("--weights.store", f"file://{tmp_path}/store")
    flags += (*lora, "--trainer.ckpt.interval", "2", "--weights.cache-dir", str(tmp_path / "cache"))
    flags += ("--weights.deltas", "--trainer.publish-dtype", "bfloat16")
    resumed = ("--max-steps", str(STEPS), "--resume")
    for end in (("--max-steps", "3"), resumed, resumed):  # the last one has nothing left to train
        result = warm.run([*command(tiny_model, tmp_path / "demo", *flags), *end])
        assert result.returncode == 0, result.stdout + result.stderr
        assert "balanced: every one of the" in result.stdout
    (cached,) = (tmp_path / "cache").glob("demo-*/inference")
    newest = cached / f"step_{max(step_folders(cached))}"
    published = read_digests(weights_folder(tmp_path / "demo", STEPS))
    assert published is not None and (published.delta is None) == bool(lora)
    assert (newest / ("adapter_model" if lora else "model")).with_suffix(".safetensors").exists()
    steps = [metrics["step"] for metrics in read_metrics(tmp_path / "demo" / "metrics" / "trainer.jsonl")]
    assert steps == list(range(STEPS))
    served = read_weights_book(tmp_path / "demo" / "ledger")
    assert served is not None and served.num_versions == served.num_verified > 0


def test_a_model_with_states_samples_and_trains_in_rows(tmp_path) -> None:
    """Gated delta nets and attention: the engine goes by HF's cache, and computes what the trainer does."""
    make_tiny_hybrid_model(tmp_path / "hybrid")
    folder = tmp_path / "demo"
    flags = ("--max-steps", "2", "--max-async-level", "0")
    result = warm.run([*command(tmp_path / "hybrid", folder), *flags])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "balanced: every one of the" in result.stdout
    for server in ("trainer", "inference"):
        said = (folder / "logs" / f"{server}.log").read_text()
        assert "Qwen3NextForCausalLM: sequences go in rows, not packed" in said
    assert "Qwen3NextForCausalLM samples by transformers' own forward and cache, all sequences in" in said
    steps = list(read_metrics(folder / "metrics" / "trainer.jsonl"))
    assert len(steps) == 2
    # Each token's r - l - 1, where the engine's roundings and the trainer's make l: a batch of 16 rows of 40.
    largest = mismatch_kl_bound(logprob_bound(tmp_path / "hybrid", 40))
    assert all(0 <= step["mismatch_kl/all/max"] <= largest < 1e-6 for step in steps)


def test_a_trainer_in_two_processes(tiny_model, tmp_path) -> None:
    folder = tmp_path / "demo"
    flags = ("--trainer.num-processes", "2", "--trainer.ckpt.asynchronous")
    result = warm.run(command(tiny_model, folder, *flags))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "balanced: every one of the" in result.stdout
    for metrics in read_metrics(folder / "metrics" / "trainer.jsonl"):
        where = folder / "token_exports" / f"step_{metrics['step']}"
        exported = [
            json.loads(line)
            for rank in range(2)
            for line in (where / f"rank_{rank}.jsonl").read_text().splitlines()
        ]
        assert_sum(exported, metrics["loss"])
        assert len(exported) == metrics["samples"]
    assert (folder / "logs" / "trainer_1.log").exists()


def test_a_model_with_experts_trains_on_those_that_it_sampled_with(tiny_moe, tmp_path) -> None:
    folder = tmp_path / "demo"
    flags = ("--trainer.enable-router-replay", "--max-steps", "3")
    result = warm.run(command(tiny_moe, folder, *flags))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "balanced: every one of the" in result.stdout
    assert "record_experts = true" in (folder / "configs" / "inference.toml").read_text()
    first, *later = read_metrics(folder / "metrics" / "trainer.jsonl")
    assert first["mismatch_kl/all/mean"] <= mismatch_kl_bound(logprob_bound(tiny_moe, 256))
    assert first["router_replace_rate/all"] <= 1e-2
    assert len(later) == 2 and all(0 < metrics["router_replace_rate/all"] < 0.5 for metrics in later)


def assert_sum(exported: list[dict], loss: float) -> None:
    """The token losses of all records add up to the loss, which is a sum of float32."""
    losses = [value for record in exported for value in record["token_loss"]]
    expected = loss * exported[0]["denominator"]
    assert sum(losses) == near(expected, terms=len(losses), scale=partial_sum(losses))


def test_the_exported_losses_add_up_to_the_logged_loss(finished) -> None:
    folder, _ = finished
    for metrics in read_metrics(folder / "metrics" / "trainer.jsonl"):
        step = records(folder, metrics["step"])
        assert_sum(step, metrics["loss"])


def test_tokens_carry_the_version_that_sampled_them(finished, tiny_model) -> None:
    folder, _ = finished
    metrics = list(read_metrics(folder / "metrics" / "trainer.jsonl"))
    for step in range(STEPS):
        versions = {
            version
            for record in records(folder, step)
            for version, sampled in zip(record["policy_versions"], record["sampled"], strict=True)
            if sampled
        }
        assert all(step - 1 <= version <= step for version in versions)
    # Step 0 trains on what its own weights sampled, step 1 on what version 0 sampled.
    assert metrics[0]["mismatch_kl/all/mean"] <= mismatch_kl_bound(logprob_bound(tiny_model, 256))
    assert metrics[1]["mismatch_kl/all/mean"] > metrics[0]["mismatch_kl/all/mean"]


def test_the_record_replays(finished, capsys) -> None:
    """Advantages, masks, losses and, from weights that are left, logprobs; and what if."""
    folder, _ = finished
    assert main(["replay", str(folder), "--weights", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in report["findings"]} == {
        *("rewards", "advantages", "ratios", "masks", "losses", "weights", "record", "loss"),
        *("learning rate", "off-policy", "ledger"),
    }
    assert report["steps"] == list(range(STEPS)) and report["notes"] == []
    assert main(["replay", str(folder), "--set", "trainer.loss.dppo_mask_high=0", "--json"]) == 0
    effect = json.loads(capsys.readouterr().out)["totals"]["all"]
    assert effect["changed"]["masked_high"] > effect["recorded"]["masked_high"]


def test_rollouts_and_exports_tell_the_same_story(finished) -> None:
    folder, _ = finished
    for step in range(STEPS):
        lines = (folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl").read_text().splitlines()
        rollouts = {rollout["rollout_id"]: rollout for rollout in map(json.loads, lines)}
        sent = {name for name, rollout in rollouts.items() if rollout["outcome"] == "sent"}
        exported = records(folder, step)
        assert sent == {record["rollout_id"] for record in exported}
        for record in exported:
            assert record["reward"] == near(rollouts[record["rollout_id"]]["reward"], terms=1)
            assert record["group_id"] == rollouts[record["rollout_id"]]["group_id"]


def test_evaluations_are_of_one_version_and_apart_in_the_ledger(finished) -> None:
    folder, output = finished
    metrics = {record["step"]: record for record in read_metrics(folder / "metrics" / "eval.jsonl")}
    assert list(metrics) == [0, 2, 4]
    num_tokens = 0
    for version, record in metrics.items():
        path = folder / "rollouts" / f"step_{version}" / "eval_rollouts.jsonl"
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        num_tokens += sum(rollout["num_tokens"] for rollout in rollouts)
        turns = [turn for rollout in rollouts for turn in rollout["trajectory"]]
        assert {own for turn in turns for own, _ in turn["policy_versions"]} == {version}
        rewards = [rollout["reward"] for rollout in rollouts]
        passed = {rollout["example_id"] for rollout in rollouts if rollout["reward"] >= 0.25}
        assert len(rewards) == 6 * 4
        assert record["eval/held-out/avg@4"] == pytest.approx(sum(rewards) / 24)
        assert record["eval/held-out/pass@4"] == pytest.approx(len(passed) / 6)
        assert f"eval {version:4d}  held-out  avg@4 {record['eval/held-out/avg@4']:.3f}" in output
    report = reconcile(folder / "ledger")
    assert report.states["demo", "held-out"] == {"eval": num_tokens}
    assert report.sampled["demo", "held-out"] == num_tokens > 0
    assert report.states["demo", "reverse-text"]["eval"] == 0
    assert re.search(r"eval +held-out avg@4 \S+ \(version 0\) → \S+ \(version 4\)", output)


def test_every_process_records_what_it_did_and_the_path_leaves_no_hole(finished) -> None:
    folder, _ = finished
    timeline = RunFolder(folder).timeline()
    assert timeline is not None and not timeline.is_approximate
    lanes = ["trainer", "batches", "orchestrator", "engine", "evaluations", "versions", "weights"]
    assert list(timeline.lanes) == lanes
    trainer = timeline.lanes["trainer"]
    for name in ("wait", "pack", "compute", "optimizer", "publish", "observe"):
        assert [span.step for span in trainer.spans if span.name == name] == list(range(STEPS)), name
    assert [span.step for span in timeline.lanes["batches"].spans] == list(range(STEPS))
    for record in read_metrics(folder / "metrics" / "trainer.jsonl"):
        spent = sum(
            span.duration_s
            for span in trainer.spans
            if span.name == "compute" and span.step == record["step"]
        )
        assert abs(spent - record["time/compute_s"]) <= 4 * math.ulp(trainer.spans[0].end)
    (life,) = trainer.lives
    assert timeline.path[0].start == life[0]
    assert timeline.path[-1].end == max(life[1], timeline.lanes["evaluations"].spans[-1].end)
    for before, after in pairwise(timeline.path):
        assert before.end == after.start
    assert {segment.lane for segment in timeline.path} >= {"trainer", "engine"}
    assert verdict(timeline) is not None


def test_it_says_where_the_token_export_goes(finished) -> None:
    folder, output = finished
    assert f"token exports go to {folder / 'token_exports'}" in output.splitlines()


def test_the_result_loads_and_the_folder_is_refused_a_second_time(finished, tiny_model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = finished
    AutoModelForCausalLM.from_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder / "model")
    again = warm.run(command(tiny_model, folder))
    assert again.returncode == 2
    assert "output_dir" in again.stderr and "clean_output_dir" in again.stderr.replace("-", "_")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", ["trainer", "orchestrator", "inference"])
def test_a_killed_process_stops_the_run_and_is_named(tiny_model, tmp_path, victim) -> None:
    folder = tmp_path / "run"
    flags = ("--max-steps", "100000")
    process = warm.start(command(tiny_model, folder, *flags))
    try:
        while not list(read_metrics(folder / "metrics" / "trainer.jsonl")):
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(processes_of(folder)[victim], signal.SIGKILL)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 1
    assert re.search(rf"error: {victim} .*SIGKILL", errors)
    assert processes_of(folder) == {}


AGENT = """
[orchestrator]
batch_size = 8
rollouts_per_example = 4
max_retries = 1
sampling.max_tokens = 12
env = [{ id = "seeker:Seeker", name = "seeker" }]
eval = [{ id = "seeker:Seeker", name = "held-out", num_examples = 1 }]
"""


def test_conversations_of_agents_lead_to_their_tokens_also_in_a_resumed_run(tiny_model, tmp_path) -> None:
    folder, file = tmp_path / "agent", tmp_path / "rl.toml"
    file.write_text(AGENT)
    flags = ["--model.name", str(tiny_model), "--output-dir", str(folder), "--seed", "1"]
    flags += ["--trainer.experimental.token-export.format", "jsonl", "--trainer.ckpt.interval", "1"]
    found = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    for more in (["--max-steps", "2"], ["--max-steps", "4", "--resume"]):
        result = warm.run(["rl", "@", str(file), *flags, *more], env={**os.environ, "PYTHONPATH": found})
        assert result.returncode == 0, result.stdout + result.stderr
    tokenizer = load_tokenizer(str(tiny_model))
    num_turns, num_retried = 0, 0
    for step in range(4):
        exported = {record["sample_id"]: record for record in records(folder, step)}
        lines = (folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl").read_text().splitlines()
        saved = {record["rollout_id"]: record for record in map(json.loads, lines)}
        for rollout_id, rollout in saved.items():
            if rollout["outcome"] == "failed_rollout":
                assert "the search has ended" in rollout["error"] and len(rollout["trajectory"]) == 2
                num_retried += f"{rollout_id}~1" in saved
                continue
            weighed = sum(rollout["metrics"][name] * weight for name, weight in rollout["weights"].items())
            assert rollout["reward"] == pytest.approx(weighed, rel=1e-6)
            assert [turn.get("keeps") for turn in rollout["trajectory"]] == [None, None, 2, 0]
            sample = 0
            for turn in rollout["trajectory"]:
                sample = turn.get("sample", sample)
                if rollout["outcome"] != "sent" or not turn.get("trainable", True):
                    continue
                tokens = exported[f"{rollout_id}-{sample}"]["token_ids"]
                start, stop = turn["num_prompt_tokens"], turn["num_prompt_tokens"] + turn["num_tokens"]
                assert tokenizer.decode(tokens[start:stop], skip_special_tokens=True) == turn["text"]
                assert (tokens[stop - 1] == tokenizer.eos_token_id) == (turn["finish_reason"] == "stop")
                num_turns += 1
    assert num_turns >= 3 * 8 * 3 and num_retried > 0
    evaluated = (folder / "rollouts" / "step_4" / "eval_rollouts.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["trajectory"]) for line in evaluated] == [4]


def test_the_gpus_of_a_machine_are_divided_between_the_processes(tiny_model, tmp_path) -> None:
    """A driver that lists four GPUs, and a torch that has none: everything computes on the CPU."""
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text('#!/bin/sh\nfor n in 0 1 2 3; do echo "GPU $n: made up (UUID: GPU-$n)"; done\n')
    driver.chmod(0o755)
    folder = tmp_path / "demo"
    environment = {"PATH": f"{driver.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3,1,0,2"}
    result = warm.run(command(tiny_model, folder, "--gpus.trainer", "2"), env=os.environ | environment)
    assert result.returncode == 0, result.stdout + result.stderr
    placed = ["trainer: GPU 3, 1", "inference: GPU 0", "inference_1: GPU 2"]
    assert result.stdout.splitlines()[:3] == placed
    report = reconcile(folder / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
    journals = {path.name for path in (folder / "ledger").glob("*.jsonl")}
    assert journals >= {"inference.jsonl", "inference_1.jsonl", "trainer.jsonl", "trainer_1.jsonl"}
    for name in ("inference", "inference_1"):
        assert list(read_metrics(folder / "metrics" / f"{name}.jsonl"))
