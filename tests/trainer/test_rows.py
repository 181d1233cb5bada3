"""Training in rows: a model with convolutions, whose gradients do not depend on how its rows are batched."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid.checks.verify.gradients import difference
from pellucid.config import TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import ConfigError
from pellucid.model.tiny import character_tokenizer
from pellucid.packing import pack_batch
from pellucid.trainer.batches import NoBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate
from tolerance import eps, gradient_bound

LENGTHS = (5, 40, 12, 3, 26, 12, 33, 8)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("hybrid"), character_tokenizer()
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        layer_types=["conv", "full_attention"],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Lfm2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def table() -> TokenTable:
    """Two groups of four with a common prompt of two tokens each."""
    generator = np.random.default_rng(0)
    samples = []
    for index, length in enumerate(LENGTHS):
        ids = [7 + index // 4, 9, *generator.integers(5, 100, length - 2).tolist()]
        own = ids[2:]
        samples.append(
            TrainingSample.from_turn(
                ids[:2],
                own,
                generator.uniform(-4.7, -4.4, len(own)),
                env_name="a",
                run_id="run",
                group_id=f"g{index // 4}",
                advantage=generator.uniform(-1, 1),
            )
        )
    return TokenTable.from_samples(samples)


def gradients_of(weights: Path, folder: Path, **trainer):
    """Gradients of one step, and its metrics."""
    lora = trainer.pop("lora", None)
    values = {
        "output_dir": folder,
        "max_steps": 1,
        "seq_len": 400,
        "model": {"name": str(weights), "lora": lora},
        "trainer": {"threads": 1, **trainer},
    }
    run = build_run(TrainerRunConfig.model_validate(values), NoBatches(), None, [])
    observer = accumulate(run, run.pack(0, table()))
    assert run.policy.way == "rows"
    run.close()
    found = {name: each.grad for name, each in run.trained.module.named_parameters() if each.requires_grad}
    return found, observer.metrics()


def test_the_gradient_does_not_depend_on_the_batch_of_rows(hybrid, tmp_path) -> None:
    whole, metrics = gradients_of(hybrid, tmp_path / "whole", micro_batch_max_tokens=400)
    allowed = gradient_bound(hybrid, sum(LENGTHS))
    checkpointing = {"model": {"activation_checkpointing": True}}
    for number, changes in enumerate(
        (
            {"micro_batch_max_tokens": 2},
            {"micro_batch_max_tokens": 96, "pad_to_multiple_of": 32},
            checkpointing,
        )
    ):
        found, _ = gradients_of(hybrid, tmp_path / str(number), **changes)
        assert difference(whole, found) <= allowed, changes
    counted = metrics.report()
    assert counted["micro_batches"] == 1


def test_padding_of_rows_counts_as_tokens(hybrid, tmp_path) -> None:
    _, metrics = gradients_of(hybrid, tmp_path, micro_batch_max_tokens=80)
    # [40, 33], [26, 12, 12], [8, 5, 3]: the longest of each times its number
    found = metrics.report()
    assert found["micro_batches"] == 3
    assert found["tokens"] == 2 * 40 + 3 * 26 + 3 * 8
    assert found["padding_tokens"] == found["tokens"] - sum(LENGTHS)


def test_bfloat16_and_adapters_go_in_rows(hybrid, tmp_path) -> None:
    exact, _ = gradients_of(hybrid, tmp_path / "float32")
    half, _ = gradients_of(hybrid, tmp_path / "bfloat16", model={"precision": "bfloat16"})
    assert 1e-4 < difference(exact, half) < 16 * eps(torch.bfloat16)
    lora = {"rank": 2, "targets": ["q_proj", "in_proj", "w1"]}
    many, _ = gradients_of(hybrid, tmp_path / "many", lora=lora, micro_batch_max_tokens=2)
    one, _ = gradients_of(hybrid, tmp_path / "one", lora=lora)
    assert one and all(".lora_" in name or "lora" in name for name in one)
    assert difference(one, many) <= gradient_bound(hybrid, sum(LENGTHS))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"compile": True}, "trainer.model.compile = true needs packed .* in rows: layer 0 .* leave trainer"),
        ({"layout": "packed"}, 'trainer.model.layout = "packed", but Lfm2ForCausalLM cannot .*Lfm2ShortConv'),
    ],
)
def test_settings_that_need_packed_sequences_are_refused(hybrid, tmp_path, settings, complaint) -> None:
    with pytest.raises(ConfigError, match=complaint):
        gradients_of(hybrid, tmp_path, model=settings)


def test_a_dummy_of_rows_is_one_token() -> None:
    packed = pack_batch(
        table().select([0]), seq_len=64, max_tokens=8, num_ranks=2, pad_to_multiple_of=32, in_rows=True
    )
    (first,), (second,) = (list(packed.micro_batches(rank)) for rank in range(2))
    assert (first.counts.tokens, first.counts.padding_tokens) == (5, 0)
    assert (second.counts.tokens, second.counts.padding_tokens) == (1, 1)


def test_a_family_that_does_not_compute_in_bfloat16_is_refused(tmp_path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    folder, tokenizer = tmp_path / "mamba", character_tokenizer()
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match='MambaForCausalLM does not compute in bfloat16 .* = "float32"'):
        gradients_of(folder, tmp_path / "half", model={"precision": "bfloat16"})
    found, _ = gradients_of(folder, tmp_path / "whole")
    assert max(float(each.abs().max()) for each in found.values()) > 1e-3
