"""What is known of published weights before anybody loads them."""

import pytest
import torch
from torch import nn

from pellucid.config.shared import LoraConfig
from pellucid.errors import TransportError
from pellucid.transport.weights import (
    check_adapter,
    check_weights,
    load_weights,
    read_weights,
    weight_shapes,
    write_adapter,
    write_version,
)


def model() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.Linear(2, 4, bias=False)})


def test_weights_are_read_one_by_one_as_they_were_written(tmp_path) -> None:
    own = model()
    write_version(own, tmp_path)
    check_weights(tmp_path, weight_shapes(own))
    read = dict(read_weights(tmp_path))
    assert read.keys() == {"first.weight", "first.bias", "second.weight"}
    assert all(torch.equal(read[name], parameter) for name, parameter in own.named_parameters())


class Router(nn.Module):
    """As in GLM-4.5 and DeepSeek-V3: the bias that chooses experts is a buffer; no gradient moves it."""

    def __init__(self, bias: list[float], calls: int) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2, bias=False)
        self.register_buffer("e_score_correction_bias", torch.tensor(bias))
        self.register_buffer("num_calls", torch.tensor(calls))
        self.register_buffer("is_open", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


def test_persistent_buffers_are_weights(tmp_path) -> None:
    own, other = Router([0.25, -3.0], calls=5), Router([0.0, 0.0], calls=0)
    write_version(own, tmp_path)
    check_weights(tmp_path, weight_shapes(other))
    load_weights(other, tmp_path)
    for name, tensor in own.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert dict(read_weights(tmp_path)).keys() == own.state_dict().keys()


def test_other_weights_are_told_apart_by_their_names_and_shapes(tmp_path) -> None:
    own = model()
    write_version(own, tmp_path)
    with pytest.raises(TransportError, match=r"lacks \['third'\], has unknown \['first.bias'\]"):
        wanted = {**weight_shapes(own), "third": torch.Size([1])}
        del wanted["first.bias"]
        check_weights(tmp_path, wanted)
    with pytest.raises(TransportError, match=r"first.weight has shape \[2, 3\]; the model has \[3, 2\]"):
        check_weights(tmp_path, {**weight_shapes(own), "first.weight": torch.Size([3, 2])})
    with pytest.raises(TransportError, match="is not a readable weight file"):
        check_weights(tmp_path / "nowhere", weight_shapes(own))


def test_an_adapter_has_to_fit_the_model_and_the_rank(tmp_path) -> None:
    parts = {"lora_A": nn.Linear(3, 4, bias=False), "lora_B": nn.Linear(4, 2, bias=False)}
    adapter = nn.ModuleDict(
        {"base_model": nn.ModuleDict({"model": nn.ModuleDict({"first": nn.ModuleDict(parts)})})}
    )
    write_adapter(adapter, LoraConfig(rank=4, targets=("first",)), "some/model", tmp_path)
    check_adapter(tmp_path, weight_shapes(model()), max_rank=4)
    with pytest.raises(TransportError, match="has rank 4 and the server takes up to 2"):
        check_adapter(tmp_path, weight_shapes(model()), max_rank=2)
    with pytest.raises(TransportError, match=r"it changes first.weight of shape \[2, 3\]"):
        check_adapter(tmp_path, {"first.weight": torch.Size([2, 5])}, max_rank=4)
