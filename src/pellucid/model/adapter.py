"""LoRA: low-rank updates beside frozen weights; a model may hold several, and one is active at a time.

    adapters = Adapters(policy, config, num_slots=2)     before the model is sharded
    adapters[1].reset(seed)                              after it: B = 0, so that nothing changes yet
    adapters[1].activate()                               the next forwards go through slot 1

Slots are made once, because a sharded model cannot get new parameters: a run takes a free slot and resets
it. An adapter's parameters have the names that PEFT gives them in its files.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import dropout

from pellucid.config.shared import LoraConfig
from pellucid.errors import ConfigError
from pellucid.model.policy import Policy

_PREFIX = "base_model.model."


class Adapter(nn.Module):
    """One slot as a module: its parameters are those that a run optimises, saves and publishes."""

    def __init__(self, layers: dict[str, Any], slot: str) -> None:
        super().__init__()
        self._layers = list(layers.values())
        self._slot = slot
        for path, layer in layers.items():
            for factor in ("lora_A", "lora_B"):
                module: nn.Module = self
                for part in (*f"{_PREFIX}{path}".split("."), factor):
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                module.register_parameter("weight", getattr(layer, factor)[slot].weight)

    def activate(self) -> None:
        """Makes forward passes use this adapter, and layers that the backward pass computes again."""
        for layer in self._layers:
            layer._active_adapter = [self._slot]  # `set_adapter` would also change `requires_grad`

    def reset(self, seed: int) -> None:
        """Draws A as PEFT does and sets B = 0; the values do not depend on the number of processes."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            whole = torch.zeros(parameter.shape)
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(parameter.shape[1])
                whole.uniform_(-bound, bound, generator=generator)
            whole = whole.to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):  # only this process's shard of it
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            with torch.no_grad():
                parameter.copy_(whole)
            parameter.grad = None


class Adapters:
    def __init__(self, policy: Policy, config: LoraConfig, *, num_slots: int = 1) -> None:
        """Adds `num_slots` adapters to the model, and freezes all other weights."""
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        self._policy = policy
        self._slots = [f"slot_{number}" for number in range(num_slots)]
        described = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=_targets(policy, config),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            for slot in self._slots:
                inject_adapter_in_model(described, policy.hf, adapter_name=slot)
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        if config.dropout:
            for _, layer in self._lora_layers():
                for slot in self._slots:
                    layer.lora_dropout[slot] = _TrainingDropout(config.dropout)

    def __getitem__(self, number: int) -> Adapter:
        """Makes the adapter from the current parameters; sharding replaces them, so ask again after it."""
        return Adapter(dict(self._lora_layers()), self._slots[number])

    def _lora_layers(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._policy.hf.named_modules():
            if hasattr(module, "lora_A"):
                yield path, module


class _TrainingDropout(nn.Module):
    """Dropout that is on where gradients are recorded; the model itself is always in evaluation mode."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def forward(self, states: Tensor) -> Tensor:
        return dropout(states, self._share, training=torch.is_grad_enabled())


def _targets(policy: Policy, config: LoraConfig) -> list[str]:
    """Lists the full names of the target layers, so that none outside the decoder matches."""
    inside = {
        name
        for name, module in policy.hf.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in f".{name}"
    }
    there = {name.rsplit(".", 1)[-1] for name in inside}
    if unknown := sorted(set(config.targets) - there):
        raise ConfigError(
            f"model.lora.targets: {', '.join(unknown)} are no linear layers of this model's decoder; it has "
            f"{', '.join(sorted(there))}"
        )
    return sorted(name for name in inside if name.rsplit(".", 1)[-1] in config.targets)
