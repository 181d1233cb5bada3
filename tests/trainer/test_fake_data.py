"""`[trainer.data.fake]`: the trainer on its own."""

import json

import numpy as np

from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.metrics import read_metrics
from pellucid.model import load_policy
from pellucid.trainer.batches import FakeBatches
from tolerance import near


def test_samples_have_full_length_and_depend_on_seed_and_step_alone() -> None:
    def batch(seed, step):
        return FakeBatches(3, length=9, vocab_size=50, run_id="r", seed=seed).next(step).table

    table = batch(0, 4)
    assert table.lengths.tolist() == [9, 9, 9]
    assert table.num_trainable == 3 * 5
    assert table["token_ids"].max() < 50
    assert table["inference_logprobs"] == near(np.full(15, -np.log(50)), terms=1)
    assert table["advantage"].tolist() == [-1, 1, -1]
    assert (table["token_ids"] == batch(0, 4)["token_ids"]).all()
    for other in (batch(0, 5), batch(1, 4)):
        assert (table["token_ids"] != other["token_ids"]).any()


def test_the_trainer_trains_without_an_orchestrator(tiny_model, tmp_path) -> None:
    """Every sample is a micro batch. Nothing was sampled: there is no ledger, and no weights are sent."""
    file = tmp_path / "trainer.toml"
    file.write_text(
        f"""
        output_dir = "{tmp_path / "run"}"
        max_steps = 2
        seq_len = 32
        model.name = "{tiny_model}"
        trainer.threads = 1
        trainer.optim.lr = 1e-3
        [trainer.data.fake]
        batch_size = 3
        """
    )
    assert main(["trainer", "@", str(file)]) == 0
    records = list(read_metrics(tmp_path / "run" / "metrics" / "trainer.jsonl"))
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert (record["micro_batches"], record["max_micro_batch_tokens"]) == (3, 32)
        assert (record["tokens"], record["loss_tokens"], record["samples"]) == (96, 48, 3)
        assert record["grad_norm"] > 0
    assert records[1]["total/tokens"] == records[1]["total/local/tokens"] == 192
    assert not (tmp_path / "run" / "ledger").exists()
    assert not (tmp_path / "run" / "weights").exists()
    trained = load_policy(ModelConfig(name=str(tmp_path / "run" / "model")))
    initial = load_policy(ModelConfig(name=str(tiny_model)))
    assert any(
        not parameter.equal(before)
        for parameter, before in zip(trained.parameters(), initial.parameters(), strict=True)
    )


def test_the_steps_that_are_asked_for_are_profiled(tiny_model, tmp_path) -> None:
    arguments = [
        *("trainer", "--model.name", str(tiny_model), "--output-dir", str(tmp_path), "--seq-len", "16"),
        *("--max-steps", "4", "--trainer.data.fake.batch-size", "1", "--trainer.threads", "1"),
        *("--trainer.profile.first-step", "1", "--trainer.profile.num-steps", "2"),
    ]
    assert main(arguments) == 0
    traces = sorted((tmp_path / "profiles").iterdir())
    assert [path.name for path in traces] == ["step_1.rank_0.json", "step_2.rank_0.json"]
    names = {event["name"] for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    for record in read_metrics(tmp_path / "metrics" / "trainer.jsonl"):
        assert record["throughput/model_tflops_per_s"] > 0
        assert 0.05 < record["memory/peak_gib"] < 100
        assert "throughput/mfu" not in record
