"""LoRA: low-rank updates beside frozen weights; a model may hold several, and one is active at a time.

    adapters = Adapters(policy, config, num_slots=2)     before the model is sharded
    adapters[1].reset(seed)                              after it: B = 0, so that nothing changes yet
    adapters[1].activate()                               the next forwards go through slot 1

Slots are made once, because a sharded model cannot get new parameters: a run takes a free slot and resets
it. An adapter's parameters have the names that PEFT gives them in its files.

Every target is a linear layer of the decoder whose forward the model calls: then trainer, engine and PEFT see
the adapter alike. The head is one if it is named: it predicts chunk by chunk from its weight, to which the
adapter's product is added. What else a model computes from a weight alone (experts, routers, kernels of
state-space layers) would pass an adapter by, and is refused.
"""

import difflib
import math
import warnings
from collections.abc import Callable, Iterator
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

    def __init__(self, layers: dict[str, Any], slot: str, config: LoraConfig) -> None:
        super().__init__()
        self._layers = list(layers.values())
        self._slot = slot
        self.config = config
        """The settings, with the targets that were chosen."""

        self.is_transposed = any(layer.fan_in_fan_out for layer in self._layers)
        """Whether the adapted weights are [inputs, outputs], as those of GPT-2."""

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
        chosen = adapted_layers(policy, config)
        self._config = config.model_copy(update={"targets": _brief_names(policy, list(chosen))})
        described = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(chosen),
            fan_in_fan_out=any(is_transposed(layer) for layer in chosen.values()),
        )
        self.summary = f"model.lora: adapters on {', '.join(_last_parts(chosen))}{_left_out(policy)}"
        """Which layers have adapters, and which of the model's weights cannot have any; one line."""

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            for slot in self._slots:
                inject_adapter_in_model(described, policy.hf, adapter_name=slot)
        if hasattr(policy.hf.get_output_embeddings(), "lora_A"):
            policy.read_through_head()
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        if config.dropout:
            for _, layer in self._lora_layers():
                for slot in self._slots:
                    layer.lora_dropout[slot] = _TrainingDropout(config.dropout, self._is_counting)

    def __getitem__(self, number: int) -> Adapter:
        """Makes the adapter from the current parameters; sharding replaces them, so ask again after it."""
        return Adapter(dict(self._lora_layers()), self._slots[number], self._config)

    def _is_counting(self) -> bool:
        balance = self._policy.balance
        return balance is not None and balance.is_counting

    def _lora_layers(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._policy.hf.named_modules():
            if hasattr(module, "lora_A"):
                yield path, module


class _TrainingDropout(nn.Module):
    """Dropout that is on where gradients are recorded, and in a forward that counts what such a one chooses;
    the model itself is always in evaluation mode."""

    def __init__(self, share: float, is_counting: Callable[[], bool]) -> None:
        super().__init__()
        self._share, self._is_counting = share, is_counting

    def forward(self, states: Tensor) -> Tensor:
        return dropout(states, self._share, training=torch.is_grad_enabled() or self._is_counting())


_CHOOSING = {"router", "gate", "shared_expert_gate", "indexer"}
"""Parts of the names of layers that choose or weigh experts or keys: by default they get no adapter."""

_KERNEL_READS = {"x_proj", "dt_proj", "out_proj"}
"""Layers of a state-space mixer whose weights kernels read past an adapter."""


def adapted_layers(policy: Policy, config: LoraConfig) -> dict[str, nn.Module]:
    """Returns the linear layers that get an adapter, by name.

    A target matches names that are equal to it or end with it after a dot. By default these are all plain
    linear layers of the decoder, fused ones included, but those that choose experts or keys. Raises
    ConfigError for a target that matches none.
    """
    linear = _linear_layers(policy)
    if config.targets is None:
        return {name: layer for name, layer in linear.items() if _CHOOSING.isdisjoint(name.split("."))}
    if head := adapted_head(policy.hf, config):
        _check_head(policy, head, config)
        linear[head] = policy.hf.get_output_embeddings()
    for target in config.targets:
        if not any(_matches(name, target) for name in linear):
            raise ConfigError(f"model.lora.targets: {target!r} {_why_not(policy, target, linear)}")
    return {
        name: layer
        for name, layer in linear.items()
        if any(_matches(name, target) for target in config.targets)
    }


def adapted_head(hf: Any, config: LoraConfig) -> str:
    """Returns the name of the head if a target names it, else ""."""
    head = hf.get_output_embeddings()
    (name,) = (name for name, module in hf.named_modules() if module is head)
    return name if any(_matches(name, target) for target in config.targets or ()) else ""


def _check_head(policy: Policy, name: str, config: LoraConfig) -> None:
    """Raises ConfigError if the head cannot have an adapter that trainer, engine and PEFT see alike."""
    head = policy.hf.get_output_embeddings()
    if head.weight is policy.hf.get_input_embeddings().weight:
        why = "is the head, which shares its weight with the embedding (tie_word_embeddings); leave it out"
    elif not _is_plain_linear(head):
        why = f"is a {type(head).__name__}, not a plain linear layer; leave it out"
    elif any(is_transposed(layer) for layer in policy.hf.modules()):
        why = "is the head, whose weight lies the other way round than those of the layers; leave it out"
    elif config.dropout:
        why = f"is the head, for which there is no dropout; set model.lora.dropout = {config.dropout} to 0"
    else:
        return
    raise ConfigError(f"model.lora.targets: {name!r} {why}")


def is_transposed(layer: nn.Module) -> bool:
    """Returns whether a linear layer stores its weight as [inputs, outputs], as those of GPT-2 do."""
    return type(layer).__name__ == "Conv1D"


def _linear_layers(policy: Policy) -> dict[str, nn.Module]:
    """Finds the layers of the decoder that compute x Wᵀ + b, and nothing else, in a forward of their own."""
    inside = {module for layer in policy.layers for module in layer.modules()}
    taken = _names_of_experts(policy)
    by_kernels = {
        child
        for module in inside
        if hasattr(module, "A_log") and hasattr(module, "D")
        for name, child in module.named_children()
        if name in _KERNEL_READS
    }
    return {
        name: module
        for name, module in policy.hf.named_modules()
        if module in inside
        and module not in by_kernels
        and _is_plain_linear(module)
        and name.rpartition(".")[2] not in taken
    }


def _names_of_experts(policy: Policy) -> set[str]:
    """Returns the last parts of names that PEFT takes for a model's experts.

    Where transformers once had experts one by one, PEFT adapts the tensor of all experts if a target is named
    like their layers were: a dense layer of that name cannot have an adapter that PEFT reads.
    """
    from peft import LoraConfig as PeftConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an earlier PEFT knows names of layers alone
        return set()
    taken = set()
    for name in {each.rpartition(".")[2] for each, _ in policy.hf.named_modules()}:
        described = PeftConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(described, policy.hf, None)
        except ValueError:  # one of two that are fused
            taken.add(name)
        else:
            taken |= {name} - set(described.target_modules or ())
    return taken


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module) or type(module).__name__ == "FalconLinear"


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _last_parts(names: Any) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _brief_names(policy: Policy, chosen: list[str]) -> tuple[str, ...]:
    """Returns the last parts of the names if they match no other module of the model, else whole names."""
    brief = _last_parts(chosen)
    names = (name for name, _ in policy.hf.named_modules())
    matched = {name for name in names if name.rpartition(".")[2] in brief}
    return tuple(brief if matched == set(chosen) else chosen)


def _experts(policy: Policy) -> list[str]:
    """Names the weights that hold all experts of a layer in one tensor, as in "mlp.experts.down_proj"."""
    return sorted(
        {
            name
            for layer in policy.layers
            for name, weight in layer.named_parameters()
            if weight.dim() == 3 and "expert" in name
        }
    )


def _left_out(policy: Policy) -> str:
    if not (experts := _experts(policy)):
        return ""
    known = {name.rpartition(".")[2] for name, _ in policy.hf.named_modules()}
    others = sorted(known & _names_of_experts(policy) - {"gate"})
    named = f", and so do {', '.join(others)}, which PEFT takes for experts" if others else ""
    return f"; experts keep their weights ({', '.join(experts)}){named}"


def _why_not(policy: Policy, target: str, linear: dict[str, nn.Module]) -> str:
    """Says why no layer that can have an adapter matches a target, and what can be done."""
    known = _last_parts(linear)
    there = f"this model's decoder has {', '.join(known)}"
    modules = dict(policy.hf.named_modules())
    found = [name for name in modules if name and _matches(name, target)]
    if any(modules[name] is policy.hf.get_input_embeddings() for name in found):
        return f"is the embedding, whose rows are looked up; leave it out: {there}"
    last = target.rpartition(".")[2]
    if found and last in _names_of_experts(policy) and any(_is_plain_linear(modules[name]) for name in found):
        return f"is a name that PEFT takes for this model's experts, which have none; leave it out: {there}"
    experts = [name for name in _experts(policy) if _matches(name, target) or f".{target}." in f".{name}"]
    if experts:
        return (
            f"is one tensor for all experts of a layer ({experts[0]}), not a linear layer, and adapters are "
            f"for those alone; leave it out, or train whole weights without [model.lora]: {there}"
        )
    if any(name.rpartition(".")[2] in _KERNEL_READS and _is_plain_linear(modules[name]) for name in found):
        return f"is read by the kernels of state-space layers past an adapter; leave it out: {there}"
    nearest = difflib.get_close_matches(target, known, n=1, cutoff=0.0)[0]
    if found:
        kind = type(modules[found[0]]).__name__
        return f"is a {kind} ({found[0]}), not a plain linear layer; the nearest is {nearest!r}, and {there}"
    return f"is no layer of this model; the nearest is {nearest!r}, and {there}"
