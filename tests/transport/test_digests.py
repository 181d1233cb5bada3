"""Digests of published weights, and of what a server makes of them."""

from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor, nn

from pellucid.checkpoint import Progress, take_back
from pellucid.config.shared import LoraConfig
from pellucid.errors import TransportError
from pellucid.transport.digests import DIGESTS, decode_digests, digest_of_tensor, read_digests
from pellucid.transport.weights import ServedWeights, WeightsCopy, write_adapter, write_version

F32, BF16 = torch.float32, torch.bfloat16


class Model(nn.Module):
    """Two layers, one of them under a second name, and a persistent buffer."""

    def __init__(self, seed: int, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(48, 32)
        self.second = nn.Linear(32, 48, bias=False)
        self.tied = self.second
        self.register_buffer("correction", torch.rand(8))
        self.to(dtype)


NAMES = {"first.weight", "first.bias", "second.weight", "correction"}


def publish(folder: Path, seed: int, dtype: torch.dtype = F32) -> dict[str, str]:
    """The digests of a published model."""
    folder.mkdir()
    copy = WeightsCopy(Model(seed), dtype)
    copy.take()
    write_version(copy, folder)
    digests = read_digests(folder)
    assert digests is not None
    return digests.tensors


def publish_adapter(folder: Path, seed: int, dtype: torch.dtype = F32) -> dict[str, str]:
    folder.mkdir()
    torch.manual_seed(seed)
    parts = {"lora_A": nn.Linear(48, 4, bias=False), "lora_B": nn.Linear(4, 32, bias=False)}
    inner = nn.ModuleDict({"first": nn.ModuleDict(parts)})
    adapter = nn.ModuleDict({"base_model": nn.ModuleDict({"model": inner})}).to(dtype)
    write_adapter(adapter, LoraConfig(rank=4), "some/model", folder)
    digests = read_digests(folder)
    assert digests is not None
    return digests.tensors


def flip(tensor: Tensor) -> None:
    """Flips the lowest bit of one number."""
    words = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    with torch.no_grad():
        tensor.view(words).view(-1)[3] ^= 1


def differing(published: dict[str, str], served: ServedWeights) -> set[str]:
    found = served.digests()
    assert published.keys() <= found.keys()
    return {name for name in published if found[name] != published[name]}


def test_a_digest_is_that_of_the_bytes_as_published(tmp_path) -> None:
    digests = publish(tmp_path / "w", seed=0, dtype=BF16)
    model = Model(0)
    assert digests.keys() == NAMES
    as_published = model.second.weight.detach().to(BF16).view(torch.uint8).numpy().tobytes()
    assert digests["second.weight"] == f"BF16-{xxhash.xxh3_64_hexdigest(as_published)}"
    buffer = model.correction.numpy().tobytes()
    assert digests["correction"] == f"F32-{xxhash.xxh3_64_hexdigest(buffer)}"
    assert digest_of_tensor("F32", b"") == "F32-2d06800538d394c2"


def test_every_byte_of_the_files_is_held_by_size_head_or_tensors(tmp_path) -> None:
    publish(tmp_path / "w", seed=0)
    publish_adapter(tmp_path / "a", seed=0)
    for folder in (tmp_path / "w", tmp_path / "a"):
        digests = read_digests(folder)
        assert digests.files.keys() == {path.name for path in folder.iterdir()} - {DIGESTS}
        for name, about in digests.files.items():
            content = (folder / name).read_bytes()
            end = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else len(content)
            assert (about.num_bytes, about.head) == (
                len(content),
                xxhash.xxh3_64_hexdigest(content[:end]),
            )


@pytest.mark.parametrize(("published", "served"), [(F32, F32), (BF16, BF16), (F32, BF16), (BF16, F32)])
def test_a_sound_server_verifies_every_tensor_and_a_flipped_bit_is_named(tmp_path, published, served) -> None:
    """Whichever way the dtype is converted."""
    first, second = publish(tmp_path / "1", 1, published), publish(tmp_path / "2", 2, published)
    model = Model(0, served)
    weights = ServedWeights(model)
    assert differing(first, weights) == NAMES
    for folder, digests in (("1", first), ("2", second), ("1", first)):
        weights.load(tmp_path / folder)
        assert differing(digests, weights) == set()
    flip(model.second.weight)
    assert differing(first, weights) == {"second.weight"}
    flip(model.second.weight)
    flip(model.correction)
    assert differing(first, weights) == {"correction"}


@pytest.mark.parametrize("served", [F32, BF16])
def test_an_update_that_arrives_by_half_and_a_stale_tensor_are_named(tmp_path, served) -> None:
    publish(tmp_path / "1", 1)
    second = publish(tmp_path / "2", 2)
    model = Model(0, served)
    weights = ServedWeights(model)
    weights.load(tmp_path / "1")
    stale = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights.load(tmp_path / "2")
    with torch.no_grad():
        for name in ("first.weight", "first.bias"):
            model.get_parameter(name).copy_(stale[name])
    assert differing(second, weights) == {"first.weight", "first.bias"}
    with torch.no_grad():
        model.first.bias.copy_(Model(2).first.bias)
    assert differing(second, weights) == {"first.weight"}


@pytest.mark.parametrize(("published", "served"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_adapters_are_held_by_what_is_served_of_them(tmp_path, published, served) -> None:
    """Both factors of a layer are named once its weight is not what they make of the base weight."""
    first, second = (publish_adapter(tmp_path / f"{seed}", seed, published) for seed in (1, 2))
    factors = {f"base_model.model.first.lora_{factor}.weight" for factor in "AB"}
    assert first.keys() == factors
    model = Model(0, served)
    weights = ServedWeights(model)
    base = model.first.weight.detach().clone()
    for folder, digests in (("1", first), ("2", second)):
        weights.load(tmp_path / folder)
        assert differing(digests, weights) == set()
    assert differing(first, weights) == factors
    flip(model.first.weight)
    assert differing(second, weights) == factors
    with torch.no_grad():
        model.first.weight.copy_(base)  # as if it had never been merged
    assert differing(second, weights) == factors
    whole = publish(tmp_path / "whole", 3, published)
    weights.load(tmp_path / "whole")
    assert differing(whole, weights) == set()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "holds no digests of weights"),
        (b'{"tensors": {"a": 1}}', r"Expected `str`, got `int` - at `\$.tensors\[...\]`"),
        (b'{"format": 2, "tensors": {}}', "has format 2; this version reads 1, so update pellucid"),
    ],
)
def test_digests_that_cannot_be_read_are_named(content, reason) -> None:
    with pytest.raises(TransportError, match=reason):
        decode_digests(content, "digests.json")


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"format": 2, "tensors": {}}'])
def test_a_resumed_trainer_gives_up_a_version_whose_digests_are_damaged(tmp_path, content) -> None:
    """Otherwise nobody could serve it, and the trainer would not publish it again."""
    weights = tmp_path / "weights"
    weights.mkdir()
    for version in (1, 2):
        publish(weights / f"step_{version}", seed=version)
    (weights / "step_2" / DIGESTS).write_bytes(content)
    take_back(tmp_path, Progress(2, {}, b"", []))
    assert [folder.name for folder in weights.iterdir()] == ["step_1"]
