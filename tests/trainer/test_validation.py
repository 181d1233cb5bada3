"""The loss on examples that are never trained on: what it is, when it is measured, what it leaves alone."""

import json
import math

import pytest
import torch

from pellucid.config import ModelConfig, SFTConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.metrics import read_metrics
from pellucid.model import load_policy
from pellucid.trainer import train_on_dataset
from pellucid.trainer.batches import DatasetBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.sft import SFTData, Validation, load_data
from pellucid.transport import Batch
from tolerance import near_logprobs

TRAIN = ["abc", "xyz", "hello", "world", "lamp"]
HELD = ["no", "bicycle", "a", "extraordinary"]


def chats(path, words):
    path.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": word},
                        {"role": "assistant", "content": word[::-1]},
                    ]
                }
            )
            + "\n"
            for word in words
        )
    )
    return path


def sft(model, folder, *, validation=None, trainer=None, **changes) -> SFTConfig:
    folder.mkdir()
    data = {"path": chats(folder / "train.jsonl", TRAIN), "batch_size": 3}
    if validation is not None:
        data["validation"] = {"path": chats(folder / "held.jsonl", HELD), **validation}
    return SFTConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": 4,
            "seq_len": 64,
            "model": {"name": str(model)},
            "data": data,
            "trainer": {"threads": 1, "optim": {"lr": 1e-2}, **(trainer or {})},
            **changes,
        }
    )


def run(config) -> list[dict]:
    train_on_dataset(config, load_data(config, load_tokenizer(config.model.name)), [])
    return list(read_metrics(config.output_dir / "metrics" / "trainer.jsonl"))


def nll_of(model, samples, seq_len=64) -> tuple[float, int]:
    """−log π per trainable token, one sequence at a time, from all logits of plain HF."""
    policy = load_policy(ModelConfig(name=str(model)))
    policy.hf.set_attn_implementation("eager")
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.from_numpy(sample.arrays["token_ids"].array().astype("int64"))[:seq_len]
        mask = torch.from_numpy(sample.arrays["loss_mask"].array().copy())[:seq_len]
        with torch.no_grad():
            logits = policy.hf(input_ids=ids[None], use_cache=False).logits[0].double()
        logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total -= float(logprobs[mask[1:]].sum())
        count += int(mask.sum())
    return total / count, count


def test_it_is_the_mean_over_all_tokens_of_the_set(tiny_model, tmp_path) -> None:
    config = sft(tiny_model, tmp_path / "run", validation={})
    records = run(config)
    held = load_data(config, load_tokenizer(str(tiny_model))).validation
    before, num_tokens = nll_of(tiny_model, held)
    after, _ = nll_of(tmp_path / "run" / "model", held)
    assert num_tokens == sum(len(word) + 1 for word in HELD)
    assert records[0]["validation/initial_loss"] == near_logprobs(before, tiny_model, 64)
    assert records[-1]["validation/loss"] == near_logprobs(after, tiny_model, 64)
    assert records[-1]["validation/tokens"] == num_tokens
    assert records[-1]["validation/perplexity"] == pytest.approx(math.exp(records[-1]["validation/loss"]))
    assert abs(after - before) > 0.01


def test_the_main_process_shares_it_table_by_table(tiny_model, tmp_path, monkeypatch) -> None:
    shared = []

    class Recorded(Ranks):
        def share(self, make):
            shared.append(make())
            return shared[-1]

    monkeypatch.setattr("pellucid.trainer.sft._PACKED_TOGETHER", 2)
    config = sft(tiny_model, tmp_path / "run", validation={}, max_steps=1)
    train_on_dataset(config, load_data(config, load_tokenizer(str(tiny_model))), [], Recorded())
    sizes = [each.table.num_sequences for each in shared if isinstance(each, Batch)]
    assert sizes == [2, 2, 3], "two tables of held-out examples, then the batch of step 0"


@pytest.mark.parametrize("cap", [32, 2])
def test_it_does_not_depend_on_packing(tiny_model, tmp_path, cap) -> None:
    whole = run(sft(tiny_model, tmp_path / "whole", validation={}, max_steps=1))
    cut = run(
        sft(tiny_model, tmp_path / "cut", validation={}, max_steps=1, trainer={"micro_batch_max_tokens": cap})
    )
    name = "validation/initial_loss"
    assert cut[0]["micro_batches"] > whole[0]["micro_batches"]
    assert cut[0][name] == near_logprobs(whole[0][name], tiny_model, 64)


def test_it_sees_what_training_sees_of_a_long_example(tiny_model, tmp_path) -> None:
    config = sft(tiny_model, tmp_path / "run", validation={}, max_steps=1, seq_len=40)
    (record,) = run(config)
    held = load_data(config, load_tokenizer(str(tiny_model))).validation
    before, num_tokens = nll_of(tiny_model, held, seq_len=40)
    assert num_tokens < sum(sample.num_trainable for sample in held)
    assert record["validation/tokens"] == num_tokens
    assert record["validation/initial_loss"] == near_logprobs(before, tiny_model, 40)


def test_training_is_bitwise_the_same_without_it(tiny_model, tmp_path) -> None:
    plain, validated = (
        sft(tiny_model, tmp_path / "a"),
        sft(tiny_model, tmp_path / "b", validation={"interval": 1}),
    )
    first, second = run(plain), run(validated)
    assert [record["loss"] for record in first] == [record["loss"] for record in second]
    assert not any(name.startswith("validation") for record in first for name in record)
    weights = [
        load_policy(ModelConfig(name=str(folder / "model"))).state_dict()
        for folder in (tmp_path / "a", tmp_path / "b")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(("interval", "steps"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (50, [4])])
def test_it_is_measured_now_and_then_and_at_the_end(tiny_model, tmp_path, interval, steps) -> None:
    records = run(sft(tiny_model, tmp_path / "run", validation={"interval": interval}, max_steps=5))
    assert [record["step"] for record in records if "validation/loss" in record] == steps
    assert [record["step"] for record in records if "validation/initial_loss" in record] == [0]


def test_the_policy_is_evaluated_and_goes_on_training(tiny_model, tmp_path) -> None:
    config = sft(tiny_model, tmp_path / "run", validation={})
    data = load_data(config, load_tokenizer(str(tiny_model)))
    run = build_run(config, DatasetBatches(data.train, 3, seed=0), None, [])
    modes = []

    def forward(micro_batch):
        modes.append((run.policy.training, torch.is_grad_enabled()))
        return run.forward(micro_batch)

    batches = [run.pack(0, table) for table in data.validation_tables()]
    validation = Validation(run.policy, forward, batches, interval=1, max_steps=1, gather=run.ranks.gather)
    run.policy.train()
    validation.measure()
    run.close()
    assert set(modes) == {(False, False)}
    assert run.policy.training and all(parameter.grad is None for parameter in run.policy.parameters())


def test_a_large_set_is_packed_in_parts(tiny_model, tmp_path) -> None:
    config = sft(tiny_model, tmp_path / "run", validation={})
    held = load_data(config, load_tokenizer(str(tiny_model))).validation
    tables = SFTData([], held * 300).validation_tables()
    assert [table.num_sequences for table in tables] == [1024, 176]
    assert sum(table.num_trainable for table in tables) == 300 * sum(len(word) + 1 for word in HELD)
