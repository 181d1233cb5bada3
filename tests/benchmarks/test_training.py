"""What `python -m benchmarks train` and `overhead` measure on, and what they say where they cannot run."""

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import alarms, overhead, train
from benchmarks.padding import padded
from benchmarks.training import SHAPES, Shape, Training, draw_table
from pellucid.data import TokenTable, TrainingSample
from pellucid.trainer.alarms import TrainerAlarms
from tolerance import logprob_bound, near


def test_a_batch_as_trl_lays_it_out() -> None:
    samples = [
        TrainingSample.from_turn([7, 8], [9], [-0.5], env_name="e", advantage=1.0),
        TrainingSample.from_turn([6], [5, 4], [-1.0, -2.0], env_name="e", advantage=-0.25),
    ]
    found = {name: values.tolist() for name, values in padded(TokenTable.from_samples(samples)).items()}
    assert found == {
        "prompt_ids": [[7, 8], [0, 6]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[9, 0], [5, 4]],
        "completion_mask": [[1, 0], [1, 1]],
        "advantages": [1.0, -0.25],
        "old_per_token_logps": [[-0.5, 0.0], [-1.0, -2.0]],
        "num_items_in_batch": 3,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_the_batch_has_the_shape_it_says(name) -> None:
    shape = SHAPES[name]
    table = draw_table(shape, 100)
    assert table.num_sequences == shape.num_groups * shape.members
    assert table.num_trainable == table.num_sampled == int(table.sampled_lengths.sum())
    for lengths, (lowest, highest) in (
        (table.prompt_lengths, shape.prompt),
        (table.sampled_lengths, shape.completion),
    ):
        assert lowest <= lengths.min() and lengths.max() <= highest
    starts, turns = table.token_offsets[:-1], table.token_offsets[:-1] + table.prompt_lengths
    for first in range(0, table.num_sequences, shape.members):
        members = range(first, first + shape.members)
        prompts = {tuple(table["token_ids"][starts[member] : turns[member]]) for member in members}
        assert len(prompts) == 1
        advantages = table["advantage"][list(members)]
        assert np.abs(advantages).max() > 0 and advantages.sum() == near(
            0.0, terms=len(advantages), scale=np.abs(advantages).sum()
        )


def test_steps_train_and_tell(tiny_model, tmp_path) -> None:
    """The loss of the first step is that of HF's own forward, a row per sample; then the weights move."""
    from transformers import AutoModelForCausalLM

    table = draw_table(Shape(2, 2, (3, 5), (2, 4)), 100)
    training = Training(tiny_model, table, tmp_path)
    for _ in range(2):
        training.step()
    training.close()

    batch = padded(table)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    width = batch["completion_ids"].shape[1]
    logprobs = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]
    ratio, advantages = (logprobs - batch["old_per_token_logps"]).exp(), batch["advantages"][:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = -(surrogate * batch["completion_mask"]).sum() / batch["num_items_in_batch"]
    losses = [report["loss"] for report in training.steps.reports]
    within = logprob_bound(tiny_model, 9) * batch["advantages"].abs().max().item()
    assert losses[0] == near(float(expected), within=within)
    assert losses[1] < losses[0]
    assert training.steps.fastest_s == training.steps.times_s[1] > 0


def test_without_trl(monkeypatch, capsys) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "BENCHMARKS", {"train": ""})
    assert bench.main(["train"]) == 2
    assert "run `make bench-train`" in capsys.readouterr().err
    assert bench.main(["all", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("skipped: benchmark train") and "make bench-train" in printed.err
    assert printed.out == ""


def test_the_overhead_of_an_export_is_measured_in_two_ways(monkeypatch) -> None:
    shape = Shape(1, 2, (3, 3), (2, 2))
    monkeypatch.setattr(overhead, "SHAPES", ["tiny"])
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setattr(overhead, "NUM_STEPS", {"tiny": 3})
    results = overhead.run()
    for format, against_none, calls in zip(overhead.FORMATS, results[::2], results[1::2], strict=True):
        assert against_none.name == f"overhead, tiny, {format}"
        assert calls.name == f"overhead, tiny, {format}, its calls"
        assert 0 < calls.baseline < calls.ours
        assert min(against_none.ours, against_none.baseline) > 0


def test_the_cost_of_alarms_is_that_of_their_calls(monkeypatch) -> None:
    """Mean of so many steps, the first ones apart; nothing stays clocked."""
    monkeypatch.setitem(SHAPES, "tiny", Shape(1, 2, (3, 3), (2, 2)))
    monkeypatch.setattr(alarms, "NUM_WINDOWS", 1)
    judge = TrainerAlarms.judge
    first, step, requests, whole = alarms.run()
    assert first.name == "alarms, one of the first steps of tiny"
    assert (step.name, requests.name) == ("alarms, a step of tiny", "alarms, 2 requests")
    assert 0 < step.baseline < step.ours
    assert first.ours - first.baseline > 0
    assert whole.baseline == step.baseline and whole.ours > step.ours + requests.ours - requests.baseline
    assert TrainerAlarms.judge is judge
