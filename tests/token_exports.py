"""A small export for tests: two steps, two environments, rl and sft, values that can be checked by hand."""

from pathlib import Path
from typing import Any

import torch

from pellucid.config import DppoLossConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.export import TokenExporter
from pellucid.loss import LossInputs, dppo_loss, sft_loss
from pellucid.model import TokenOutput
from pellucid.trainer.observer import observed_values


def table_of(step: int, mode: str) -> TokenTable:
    """Three sequences; the second has no trainable token, the third a token that leaves the trust region."""
    common = {"training_mode": mode, "run_id": "r", "policy_versions": step}
    samples = [
        TrainingSample.from_turn(
            [1, 2], [3, 4], [-1.0, -0.5], env_name="a", reward=1.0, advantage=0.5, **common
        ),
        TrainingSample.from_turn([1], [2], [-1.0], env_name="a", completion_mask=False, **common),
        TrainingSample.from_turn(
            [7], [8], [-2.0], env_name="b", reward=0.0, advantage=1.0, role_spans=[["user", 0, 1]], **common
        ),
    ]
    return TokenTable.from_samples(samples).pad_to(10)


def observe(table: TokenTable, mode: str) -> dict[str, Any]:
    logprobs = torch.tensor([-3.0, -1.0, -1.5, -0.25, -3.0, -1.0, -3.0, -0.5, -3.0, -3.0])
    inputs = LossInputs.of(to_tensors(table, torch.device("cpu")), logprobs)
    record = sft_loss(inputs) if mode == "sft" else dppo_loss(inputs, DppoLossConfig())
    return observed_values(TokenOutput(logprobs, logprobs.abs()), record)


def write_run(folder: Path, **options: Any) -> Path:
    """Two steps: rl, then a micro batch of rl and one of sft."""
    exporter = TokenExporter(folder, **options)
    for step, modes in enumerate((["rl"], ["rl", "sft"])):
        for micro_step, mode in enumerate(modes):
            table = table_of(step, mode)
            exporter.add(table, observe(table, mode), step=step, micro_step=micro_step, denominator=3)
        exporter.finish(step)
        exporter.mark_stable(step)
    exporter.close()
    return folder
