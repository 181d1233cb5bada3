"""Weights beside an adapter are held in the dtype of the forward: same numbers, half the memory."""

from dataclasses import replace

import pytest
import torch

from pellucid.config import TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.model.tiny import make_tiny_model
from pellucid.trainer.build import build_run
from pellucid.trainer.parallel import Ranks

VARIANTS = {
    "plain": {},
    "head": {"lora": {"targets": ["lm_head", "v_proj"]}},
    "checkpointed": {"model": {"activation_checkpointing": True}},
    "experts": {},
    "rows": {"model": {"layout": "rows"}},
}


def table() -> TokenTable:
    return TokenTable.from_samples(
        [
            TrainingSample.from_turn(
                [5, 6, 7, 8],
                list(range(9 + index, 19 + 2 * index)),
                [-4.0] * (10 + index),
                env_name="a",
                run_id="run",
                rollout_id=f"r{index}",
                group_id="g",
                reward=1.0,
                advantage=(-1) ** index * 0.7,
                temperature=0.8,
            )
            for index in range(3)
        ]
    )


def config(model, folder, variant, precision="bfloat16") -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "seq_len": 128,
            "model": {"name": str(model), "lora": {"rank": 4, **variant.get("lora", {})}},
            "trainer": {"threads": 1, "model": {"precision": precision, **variant.get("model", {})}},
        }
    )


def trained(settings: TrainerRunConfig, ranks: Ranks) -> tuple[list[torch.Tensor], dict[str, torch.dtype]]:
    """Logprobs and gradients of two steps, the weights after them, and the dtype of every weight."""
    run = build_run(settings, None, None, [], ranks)
    found = []
    for step in range(2):  # in the first, B is 0, and so is the gradient of A
        batch = run.pack(step, table())
        for micro_batch in batch.micro_batches:
            output = run.forward(micro_batch)
            found.append(output.logprobs.detach())
            run.loss(micro_batch, output, batch.denominator).loss.backward()
        parameters = [each for each in run.policy.parameters() if each.requires_grad]
        found += [each.grad.clone() for each in parameters if each.grad is not None]
        run.optimizer.step()
    found += [each.detach() for each in parameters]
    dtypes = {name: each.dtype for name, each in run.policy.named_parameters()}
    run.close()
    return found, dtypes


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_are_those_of_weights_in_float32(name, tmp_path, request) -> None:
    model = tmp_path / "untied"
    if name == "head":
        make_tiny_model(model, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, tied=False)
    else:
        model = request.getfixturevalue("tiny_moe" if name == "experts" else "tiny_model")
    settings = config(model, tmp_path, VARIANTS[name])
    ranks = Ranks.alone(settings.trainer, torch.device("cpu"))
    held, dtypes = trained(settings, ranks)
    wide, wide_dtypes = trained(settings, replace(ranks, keeps_float32=True))
    assert all(torch.equal(*pair) for pair in zip(held, wide, strict=True))
    assert any(bool(each.any()) for each in held[1:])
    assert set(wide_dtypes.values()) == {torch.float32}
    assert all(
        dtype == (torch.float32 if ".lora_" in name else torch.bfloat16) for name, dtype in dtypes.items()
    )


def test_float32_forwards_and_whole_weights_stay_in_float32(tiny_model, tmp_path) -> None:
    settings = config(tiny_model, tmp_path, {}, precision="float32")
    whole = config(tiny_model, tmp_path, {})
    whole = whole.model_copy(update={"model": whole.model.model_copy(update={"lora": None})})
    for each in (settings, whole):
        _, dtypes = trained(each, Ranks.alone(each.trainer, torch.device("cpu")))
        assert set(dtypes.values()) == {torch.float32}
