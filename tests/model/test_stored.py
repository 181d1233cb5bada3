"""A process that reads its part of the weights alone has what transformers loads, or the same refusal."""

import logging
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from pellucid.config import ModelConfig, TrainerConfig
from pellucid.errors import ModelError
from pellucid.model import load, load_policy
from pellucid.model.load import prove_unread, unread_policy
from pellucid.model.stored import NotByRows
from pellucid.trainer.parallel import Ranks, _allocate

sys.path.insert(0, str(Path(__file__).parent))
import families
from test_proof import REFUSED, ROWS

HOST = torch.device("cpu")


@pytest.fixture
def ranks():
    """One process in a group: it loads as each of several does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks.of(TrainerConfig(), dist.group.WORLD, HOST)
    dist.destroy_process_group()


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of a model's file, or takes them out."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2", "llama with longrope RoPE", *ROWS]
)
def test_weights_and_buffers_are_those_that_transformers_loads(name, tmp_path) -> None:
    families.make(name).save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    policy, stored = unread_policy(config, families.CONTEXT)
    prove_unread(policy, config, families.CONTEXT)
    _allocate(policy, HOST)
    stored.fill()
    loaded = load_policy(config, trainable=True, max_length=families.CONTEXT)
    expected = loaded.hf
    assert policy.traits._replace(why_rows="") == loaded.traits._replace(why_rows="")
    assert policy.why_rows.split(" by up to ")[0] == loaded.why_rows.split(" by up to ")[0]
    own = {**dict(policy.hf.named_parameters()), **dict(policy.hf.named_buffers())}
    others = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert own.keys() == others.keys()
    for key, tensor in own.items():
        assert tensor.dtype == others[key].dtype and torch.equal(tensor, others[key]), key


def refusal(attempt) -> str:
    with pytest.raises(ModelError) as refused:
        attempt()
    return str(refused.value).split(" by up to ")[0]  # nats depend on the weights


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_with_its_weights_is_refused_without_them(name, tmp_path, ranks) -> None:
    families.make(name).save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    expected = refusal(lambda: load_policy(config, trainable=True, max_length=families.CONTEXT))
    assert refusal(lambda: ranks.load(config, families.CONTEXT)) == expected


NORM, EMBEDDING = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "changes",
    [{NORM: None}, {EMBEDDING: None}, {NORM: torch.ones(5)}, {EMBEDDING: torch.ones(3, 32), NORM: None}],
)
def test_weights_that_do_not_fit_are_refused_as_ever(folder, ranks, changes) -> None:
    change(folder, **changes)
    config = ModelConfig(name=str(folder))
    expected = refusal(lambda: load_policy(config, trainable=True))
    assert "do not fit its config.json" in expected
    assert refusal(lambda: unread_policy(config)) == expected
    assert refusal(lambda: ranks.load(config, 64)) == expected


def test_a_torn_file_is_refused_as_ever(folder, ranks) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    config = ModelConfig(name=str(folder))
    expected = refusal(lambda: load_policy(config, trainable=True))
    assert refusal(lambda: ranks.load(config, 64)) == expected


def test_numbers_that_are_not_finite_are_refused_by_name(folder, ranks) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        change(folder, **{NORM: torch.tensor([1.0] * 31 + [bad])})
        policy, stored = ranks.load(ModelConfig(name=str(folder)), 64)
        assert stored is not None
        with pytest.raises(ModelError, match=f"{NORM} holds NaN or infinities; start from an earlier"):
            ranks.shard(policy, stored)


def test_a_file_that_is_gone_is_named(folder, ranks) -> None:
    policy, stored = ranks.load(ModelConfig(name=str(folder)), 64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"its weights cannot be read any more \(.*No such file"):
        ranks.shard(policy, stored)


def of_torch(folder: Path) -> None:
    """As files were stored before safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_two_halves(folder: Path) -> None:
    """A weight under names that transformers does not know, besides one that is missing."""
    whole = load_file(folder / "model.safetensors")[NORM]
    change(folder, **{NORM: None, "half": whole[:16].clone()})


def quantised(folder: Path) -> None:
    change(folder, **{"model.norm.weight": torch.ones(32, dtype=torch.float8_e4m3fn)})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (of_torch, "it has no safetensors files"),
        (in_two_halves, f"{NORM} is not in its files under that name"),
        (quantised, "model.norm.weight is stored as F8_E4M3"),
    ],
)
def test_files_that_cannot_be_read_by_rows_are_left_to_transformers(
    folder, ranks, spoil, reason, caplog
) -> None:
    config = ModelConfig(name=str(folder))
    spoil(folder)
    with pytest.raises(NotByRows, match=reason):
        unread_policy(config)
    with caplog.at_level(logging.WARNING, "pellucid"):
        if spoil is in_two_halves:
            assert f"{NORM} is missing" in refusal(lambda: ranks.load(config, 64))
        else:
            policy, stored = ranks.load(config, 64)
            assert stored is None and not policy.hf.model.norm.weight.is_meta
    (line,) = caplog.messages
    assert line == (
        f"model.name = {str(folder)!r}: the first process reads all weights, with 4 bytes of host memory for "
        f"each, because process 0 cannot read its part alone: {reason}"
    )


class TwoMachines(Ranks):
    """A process whose only neighbour answers as it does, but for the hash of its weights."""

    def gather_all(self, value):
        return [value, ("", "another hash", None) if isinstance(value, tuple) else value]


def test_machines_with_other_weights_under_the_same_name_are_refused(folder, ranks) -> None:
    two = TwoMachines(group=ranks.group, device=HOST)
    with pytest.raises(ModelError, match="process 1 of the trainer finds other weights there than the first"):
        two.load(ModelConfig(name=str(folder)), 64)


def test_a_proof_without_weights_takes_the_memory_of_one_layer(tmp_path) -> None:
    """All layers are there, and those of a kind share their weights."""
    families.make("qwen3_moe").save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    policy, _ = unread_policy(config)
    with patch.object(load, "_proved", wraps=load._proved) as proved:
        prove_unread(policy, config, families.CONTEXT)
    hf = proved.call_args.args[0]
    pointers = {
        name: {layer.get_parameter(name).data_ptr() for layer in hf.model.layers}
        for name, _ in hf.model.layers[0].named_parameters()
    }
    assert len(hf.model.layers) == 4
    assert pointers and all(len(found) == 1 for found in pointers.values())
    assert all(float(each.detach().std()) > 0 for each in hf.parameters())
