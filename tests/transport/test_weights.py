"""What is known of published weights before anybody loads them."""

import pytest
import torch
from torch import nn

from pellucid.config.model import LoraConfig
from pellucid.errors import TransportError
from pellucid.transport.adapter import check_adapter, write_adapter
from pellucid.transport.weights import check_weights, read_weights, write_version


def model() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.Linear(2, 4, bias=False)})


def shapes(own: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in own.named_parameters()}


def test_weights_are_read_one_by_one_as_they_were_written(tmp_path) -> None:
    own = model()
    write_version(own, tmp_path)
    check_weights(tmp_path, shapes(own))
    read = dict(read_weights(tmp_path))
    assert read.keys() == {"first.weight", "first.bias", "second.weight"}
    assert all(torch.equal(read[name], parameter) for name, parameter in own.named_parameters())


def test_other_weights_are_told_apart_by_their_names_and_shapes(tmp_path) -> None:
    own = model()
    write_version(own, tmp_path)
    with pytest.raises(TransportError, match=r"lacks \['third'\], has unknown \['first.bias'\]"):
        wanted = {**shapes(own), "third": torch.Size([1])}
        del wanted["first.bias"]
        check_weights(tmp_path, wanted)
    with pytest.raises(TransportError, match=r"first.weight has shape \[2, 3\]; the model has \[3, 2\]"):
        check_weights(tmp_path, {**shapes(own), "first.weight": torch.Size([3, 2])})
    with pytest.raises(TransportError, match="is not a readable weight file"):
        check_weights(tmp_path / "nowhere", shapes(own))


def test_an_adapter_has_to_fit_the_model_and_the_rank(tmp_path) -> None:
    parts = {"lora_A": nn.Linear(3, 4, bias=False), "lora_B": nn.Linear(4, 2, bias=False)}
    adapter = nn.ModuleDict(
        {"base_model": nn.ModuleDict({"model": nn.ModuleDict({"first": nn.ModuleDict(parts)})})}
    )
    write_adapter(adapter, LoraConfig(rank=4), "some/model", tmp_path)
    check_adapter(tmp_path, shapes(model()), max_rank=4)
    with pytest.raises(TransportError, match="has rank 4 and the server takes up to 2"):
        check_adapter(tmp_path, shapes(model()), max_rank=2)
    with pytest.raises(TransportError, match=r"it changes first.weight of shape \[2, 3\]"):
        check_adapter(tmp_path, {"first.weight": torch.Size([2, 5])}, max_rank=4)
