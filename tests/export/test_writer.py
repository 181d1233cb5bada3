"""What is exported is what the loss did: golden records, order, and files that appear when they are whole."""

import json
import math

import numpy as np
import pytest
import torch

from pellucid.config import DppoLossConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.export import FIELDS, TokenExporter
from pellucid.loss import LossInputs, LossRecord, dppo_loss
from pellucid.model import TokenOutput
from pellucid.trainer.observer import observed_values


def table_of(case) -> TokenTable:
    """A micro batch of a golden case; such cases may mark a first token trainable, so samples will not do."""
    values, lengths = case["inputs"]["micro_batch"], case["inputs"]["sequence_lengths"]
    starts = np.cumsum([0, *lengths[:-1]])
    num_tokens = sum(lengths)
    columns = {
        "token_ids": np.array(values["input_ids"][0], np.uint32),
        "loss_mask": np.array(values["loss_mask"][0]),
        "sampled": np.ones(num_tokens, np.bool_),
        "inference_logprobs": np.array(values["inference_logprobs"][0], np.float32),
        "policy_versions": np.zeros(num_tokens, np.int32),
        "advantages": np.array(values["advantages"][0], np.float32),
        "env_name": np.array([values["env_names"][start] for start in starts], object),
    }
    rewards = values.get("rewards")
    per_sequence = [math.nan if rewards is None else rewards[0][start + 1] for start in starts]
    columns["reward"] = np.array(per_sequence, np.float32)
    return TokenTable(np.array(lengths), columns)


def export(case, tmp_path):
    table = table_of(case)
    model = case["inputs"]["model_output"]
    output = TokenOutput(torch.tensor(model["logprobs"][0]), torch.tensor(model["entropy"][0]))
    inputs = LossInputs.of(to_tensors(table, torch.device("cpu")), output.logprobs)
    config = case["inputs"]["loss_config"]
    if isinstance(config, dict):
        record = dppo_loss(inputs, DppoLossConfig(**config))
    else:
        record = LossRecord(torch.zeros_like(output.logprobs), inputs.ratios)
    exporter = TokenExporter(tmp_path, rank=case["inputs"]["rank"])
    step, micro_step = case["inputs"]["step"], case["inputs"]["micro_step"]
    exporter.add(table, observed_values(output, record), step=step, micro_step=micro_step, denominator=1)
    exporter.finish(step)


KL_TOLERANCE = 1e-4


def assert_same(found, expected, name) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right, name)
    elif isinstance(expected, float):
        tolerance = KL_TOLERANCE if name == "mismatch_kl" else 1e-5
        assert found == pytest.approx(expected, rel=tolerance, abs=1e-6), name
    else:
        assert found == expected, name


@pytest.mark.golden("token_export")
def test_golden_records(case, tmp_path) -> None:
    export(case, tmp_path)
    (path,) = case["outputs"]["files"]
    records = [json.loads(line) for line in (tmp_path / path).read_text().splitlines()]
    assert len(records) == len(case["outputs"]["records"])
    for found, expected in zip(records, case["outputs"]["records"], strict=True):
        assert list(found) == [field.name for field in FIELDS]
        for name, value in expected.items():
            if name == "rewards" and case["name"] == "non-finite -> null":
                continue  # one reward per rollout here; the case has a single NaN among a sequence's tokens
            assert_same(found[name], value, name)


def samples():
    return TokenTable.from_samples(
        [
            TrainingSample.from_turn([1], [2, 3], [-1.0, -2.0], env_name="a", completion_mask=False),
            TrainingSample.from_turn(
                [4], [5], [-1.0], env_name="b", group_id="g", role_spans=[["user", 0, 1]]
            ),
        ]
    ).pad_to(8)


def observed(num_tokens):
    zeros = torch.zeros(num_tokens)
    return observed_values(TokenOutput(zeros, zeros), LossRecord(zeros, None))


def test_sequences_without_a_trainable_token_are_counted_not_exported(tmp_path) -> None:
    exporter = TokenExporter(tmp_path)
    table = samples()
    exporter.add(table, observed(table.num_tokens), step=0, micro_step=0, denominator=1)
    exporter.finish(0)
    (line,) = (tmp_path / "token_exports" / "step_0" / "rank_0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["env_name"], record["micro_sequence_idx"], record["export_sequence_idx"]) == ("b", 1, 0)
    assert record["role_spans"] == [["user", 0, 1]]
    assert record["policy_versions"] == [-1, 0]
    assert exporter.num_skipped == 1


def test_a_step_is_invisible_until_it_is_whole(tmp_path) -> None:
    exporter = TokenExporter(tmp_path)
    table = samples()
    folder = tmp_path / "token_exports" / "step_3"
    exporter.add(table, observed(table.num_tokens), step=3, micro_step=0, denominator=1)
    assert list(folder.glob("*")) == [folder / ".rank_0.jsonl.partial"]
    exporter.finish(3)
    assert [path.name for path in folder.iterdir()] == ["rank_0.jsonl"]
    exporter.mark_stable(3)
    assert (folder / "STABLE").exists()


def test_an_explicit_path_gets_the_rank_and_all_steps(tmp_path) -> None:
    exporter = TokenExporter(tmp_path, rank=2, path=tmp_path / "mine.jsonl")
    table = samples()
    for step in range(2):
        exporter.add(table, observed(table.num_tokens), step=step, micro_step=0, denominator=1)
        exporter.finish(step)
        exporter.mark_stable(step)
    lines = (tmp_path / "mine.rank_2.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
