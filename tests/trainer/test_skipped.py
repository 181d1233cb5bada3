"""A step whose loss or gradient is not finite: nothing moves, everything is recorded, the run goes on."""

import json
import logging
import math
import re
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from pellucid import export
from pellucid.checkpoint import newest_intact
from pellucid.checks.replay import run_replay
from pellucid.config import SFTConfig, TrainerRunConfig
from pellucid.config.base import save
from pellucid.config.tools import ReplaySettings
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import DataError
from pellucid.launch.run_folder import rewind_rl
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.loss import LossInputs, LossRecord
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model
from pellucid.orchestrator.snapshot import Snapshot, write_snapshot
from pellucid.trainer import train_on_dataset
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.trainer.sft import load_data
from pellucid.transport import Batch, FilesystemReceiver, FilesystemSender, encode_batch

HUGE = 1e19
"""Marks the samples that the losses below break on."""

NUM_STEPS = 6


def broken_loss(inputs: LossInputs) -> LossRecord:
    """NaN on the tokens of one rollout."""
    losses = -inputs.advantages * inputs.log_ratio().exp()
    return LossRecord(torch.where(inputs.advantages > HUGE / 2, math.nan, losses), inputs.ratios)


def steep_loss(inputs: LossInputs) -> LossRecord:
    """Finite, with a finite gradient; but the square of 1e30, of which a norm is made, is no float32."""
    slope = torch.where(inputs.advantages > HUGE / 2, 1e30, inputs.advantages)
    return LossRecord(-slope * inputs.log_ratio(), inputs.ratios)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "broken_losses", sys.modules[__name__])


LOSSES = {
    "gradient": {"type": "custom", "import_path": "broken_losses:steep_loss"},
    "token": {"type": "custom", "import_path": "broken_losses:broken_loss"},
}
CAUSES = {
    "gradient": "the norm of the gradient is inf",
    "token": r"the loss of token 3 of rollout 'r\d1', environment 'b', is nan \(trainer logprob -\d.*, "
    r"inference logprob -4.5, advantage 1e\+19\)",
}


def settings(model, folder, *, loss="gradient", **trainer) -> TrainerRunConfig:
    own = {
        "threads": 1,
        "ckpt": {"interval": 100},
        "optim": {"lr": 1e-3},
        "scheduler": {"type": "linear", "warmup_steps": 2},
        "loss": LOSSES[loss],
        "experimental": {"token_export": {}},
    }
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": NUM_STEPS,
            "seq_len": 64,
            "model": {"name": str(model)},
            "trainer": {**own, **trainer},
        }
    )


def table(step: int, *, is_bad: bool) -> TokenTable:
    return TokenTable.from_samples(
        [
            TrainingSample.from_turn(
                [7 + step, 8, 9],
                [10 + step, 11, 12],
                [-4.5, -4.5, -4.5],
                completion_mask=[True, True, index == 1],
                env_name="ab"[index],
                run_id="run",
                group_id=f"g{step}",
                rollout_id=f"r{step}{index}",
                reward=float(index),
                advantage=HUGE if is_bad and index == 1 else index - 0.5,
            )
            for index in range(2)
        ]
    )


def send(folder, bad: set[int]) -> None:
    for step in range(NUM_STEPS):
        FilesystemSender(folder).send(step, encode_batch(Batch("run", step, table(step, is_bad=step in bad))))
    write_snapshot(folder, Snapshot(batches_sent=NUM_STEPS))


def run(config, *, resume=False):
    folder = config.output_dir
    journal = Journal(folder / "ledger" / "trainer.jsonl", Stage.TRAINER, resume=resume)
    config = config.model_copy(update={"resume": resume})
    built = build_run(config, OrchestratorBatches(FilesystemReceiver(folder)), journal, [], publishes=True)
    try:
        if resume:
            built.restore()
        train(built)
    finally:
        built.close()
    return built


def weights(folder, version):
    return load_file(folder / "weights" / f"step_{version}" / "model.safetensors")


def are_equal(one, two) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def booked(folder) -> list[Counter]:
    """States of sampled tokens by step."""
    found = [Counter() for _ in range(NUM_STEPS)]
    for entry in read_journal(folder / "ledger" / "trainer.jsonl"):
        if entry.counts:  # others mark what a checkpoint covers
            found[entry.step].update(entry.counts)
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_a_skipped_step_is_recorded_and_moves_nothing(tiny_model, tmp_path, loss, caplog) -> None:
    config = settings(tiny_model, tmp_path, loss=loss, keep_weights=9)
    send(tmp_path, {1, 3})
    with caplog.at_level(logging.WARNING):
        run(config)
    published = [weights(tmp_path, version) for version in range(1, NUM_STEPS + 1)]
    moved = [not are_equal(*pair) for pair in pairwise(published)]
    assert moved == [False, True, False, True, True]

    told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(told) == 2 and told[0].startswith(f"step 1 of {tmp_path} is skipped: ")
    assert all(re.search(CAUSES[loss], line) for line in told), told

    records = list(read_metrics(tmp_path / "metrics" / "trainer.jsonl"))
    assert [record["skipped_steps"] for record in records] == [0, 1, 0, 1, 0, 0]
    assert [record["total/skipped_steps"] for record in records] == [0, 1, 1, 2, 2, 2]
    assert [record["trained_tokens"] for record in records] == [5, 0, 5, 0, 5, 5]
    assert [record["loss"] is None for record in records] == [
        loss == "token" and s in (1, 3) for s in range(6)
    ]
    # The schedule goes by steps, so that a resume is at the same place of it.
    assert [record["lr"] for record in records] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])

    for step, counts in enumerate(booked(tmp_path)):
        expected = {"skipped": 5} if step in (1, 3) else {"trained": 5}
        assert {name: counts[name] for name in ("skipped", "masked", "trained") if counts[name]} == expected
        assert counts["received"] == 6 and counts["untrainable"] == 1

    opened = export.open(tmp_path)
    assert list(opened.steps) == list(range(NUM_STEPS))
    bad = next(record for record in opened.step(3) if record["rollout_id"] == "r31")
    assert bad["advantage"] == pytest.approx(HUGE)
    assert [value is None or math.isnan(value) for value in bad["token_loss"]][3:] == [loss == "token"] * 3

    save(config, tmp_path / "configs" / "trainer.toml")
    replay = ReplaySettings.model_validate({"run": tmp_path})
    assert run_replay(replay) == 0
    # What the log says of a skipped step is compared, too.
    path = tmp_path / "metrics" / "trainer.jsonl"
    records[3]["loss"] = 0.25
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run_replay(replay) == 1


def test_the_optimizer_is_where_it_was(tiny_model, tmp_path) -> None:
    """Weights and moments, bit by bit: with the bad batch or without it, the next step is the same."""
    results = []
    for name, bad in (("with", {0}), ("without", set())):
        config = settings(tiny_model, tmp_path / name, scheduler={"type": "constant"})
        send(config.output_dir, bad)
        start = 0 if bad else 1
        built = build_run(config, OrchestratorBatches(FilesystemReceiver(config.output_dir)), None, [])
        built.start = start
        built.max_steps = 3
        train(built)
        built.close()
        state = built.optimizer.adamw.state_dict()["state"]
        moments = {f"{index} {key}": value for index, each in state.items() for key, value in each.items()}
        results.append(moments | dict(built.policy.named_parameters()))
    assert are_equal(*results)


@pytest.mark.parametrize("limit", [1, 2])
def test_too_many_in_a_row_end_the_run_and_a_resume_goes_on_after_them(tiny_model, tmp_path, limit) -> None:
    config = settings(tiny_model, tmp_path, max_skipped_steps=limit)
    last = 1 if limit == 1 else 4
    send(tmp_path, {1, 3, 4})
    with pytest.raises(DataError) as ended:
        run(config)
    which = "step 1 was" if limit == 1 else "steps 3 to 4 were"
    assert str(ended.value).startswith(
        f"{which} skipped, as many in a row as trainer.max_skipped_steps = {limit} allows: the norm of the "
        f"gradient is inf. The weights are those of policy version {last - limit + 1}, and a checkpoint "
        f"holds them: look at their tokens with `pellucid view {tmp_path}`; then --resume goes on with"
    )
    assert list(export.open(tmp_path).steps) == list(range(last + 1))
    progress = newest_intact(tmp_path)
    assert progress is not None and progress.step == last + 1
    assert booked(tmp_path)[last]["skipped"] == 5

    # The batches that follow are good: the run comes to its end.
    if limit == 2:
        point = rewind_rl(config)
        assert (point.checkpoint, point.next_batch, point.num_rolled_back) == (5, NUM_STEPS, 0)
        run(config, resume=True)
        assert [counts["skipped"] for counts in booked(tmp_path)] == [0, 5, 0, 5, 5, 0]
        records = list(read_metrics(tmp_path / "metrics" / "trainer.jsonl"))
        assert [record["total/skipped_steps"] for record in records] == [0, 1, 1, 2, 3, 3]
        assert (tmp_path / "model" / "config.json").exists()


def test_resumed_after_a_skipped_step_is_as_if_it_had_not_stopped(tiny_model, tmp_path) -> None:
    """A checkpoint right after the step that was skipped."""
    folders = [tmp_path / "whole", tmp_path / "cut"]
    for folder in folders:
        config = settings(tiny_model, folder, ckpt={"interval": 2})
        send(folder, {1})
        if folder.name == "cut":
            run(config.model_copy(update={"max_steps": 2}))
            run(config, resume=True)
        else:
            run(config)
    whole, cut = (weights(folder, NUM_STEPS) for folder in folders)
    assert are_equal(whole, cut)
    records = [list(read_metrics(folder / "metrics" / "trainer.jsonl"))[-1] for folder in folders]
    for name in ("loss", "grad_norm", "lr", "total/skipped_steps", "total/trained_tokens"):
        assert records[0][name] == records[1][name], name


def test_sft_that_diverges_ends_with_the_cause(tmp_path) -> None:
    """The first step moves every weight by 1e30; nothing is finite after it."""
    make_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2)
    rows = [{"prompt": "abc", "completion": "cba"}] * 4
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = SFTConfig.model_validate(
        {
            "output_dir": tmp_path / "run",
            "max_steps": 9,
            "seq_len": 64,
            "model": {"name": str(tmp_path / "model")},
            "trainer": {"threads": 1, "optim": {"lr": 1e30}},
            "data": {"path": tmp_path / "data.jsonl", "batch_size": 2},
        }
    )
    data = load_data(config, load_tokenizer(config.model.name))
    with pytest.raises(DataError, match="steps 1 to 3 were skipped.*the gradient of .* is not.*export their"):
        train_on_dataset(config, data, [])
    records = list(read_metrics(tmp_path / "run" / "metrics" / "trainer.jsonl"))
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 1]
