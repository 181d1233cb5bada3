"""The weights that a run trains: all of the model's, or one adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import nn

from pellucid.config.shared import LoraConfig
from pellucid.model import Adapter, Policy
from pellucid.transport.weights import offer_weights, write_adapter, write_version, write_weights


class Trained(Protocol):
    @property
    def module(self) -> nn.Module:
        """Module whose parameters, and no others, are optimised and saved in checkpoints."""

    def activate(self) -> None:
        """Makes the following forward passes use these weights."""

    def write(self, folder: Path) -> None:
        """Writes a policy version for engines, in the main process; if sharded, the others `offer`."""

    def save(self, folder: Path) -> None:
        """Writes the result, for `AutoModelForCausalLM.from_pretrained`; the other processes `offer`."""

    def offer(self) -> None:
        """Takes part in gathering the shards while the main process writes or saves."""


@dataclass(frozen=True)
class WholeModel:
    policy: Policy
    is_sharded: bool
    tokenizer: Any

    @property
    def module(self) -> nn.Module:
        return self.policy

    def activate(self) -> None:
        """Does nothing: the whole model is always in use."""

    def write(self, folder: Path) -> None:
        write_version(self.policy.hf, folder)

    def save(self, folder: Path) -> None:
        if self.is_sharded:
            whole = folder / "whole.safetensors"
            write_weights(self.policy.hf, whole)
            self.policy.hf.save_pretrained(folder, state_dict=load_file(whole))  # mapped, not read
            whole.unlink()
        else:
            self.policy.hf.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def offer(self) -> None:
        offer_weights(self.policy.hf)


@dataclass(frozen=True)
class OneAdapter:
    adapter: Adapter
    config: LoraConfig
    base: str
    """Hub name or folder of the base model."""

    tokenizer: Any

    @property
    def module(self) -> nn.Module:
        return self.adapter

    def activate(self) -> None:
        self.adapter.activate()

    def write(self, folder: Path) -> None:
        write_adapter(self.adapter, self.config, self.base, folder)

    def save(self, folder: Path) -> None:
        self.write(folder)
        self.tokenizer.save_pretrained(folder)

    def offer(self) -> None:
        offer_weights(self.adapter)
