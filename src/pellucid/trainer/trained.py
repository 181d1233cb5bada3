"""What a run changes: all weights of the model, or one adapter beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import nn

from pellucid.config.model import LoraConfig
from pellucid.model import Adapter, Policy
from pellucid.transport.adapter import write_adapter
from pellucid.transport.weights import offer_weights, write_version, write_weights


class Trained(Protocol):
    @property
    def module(self) -> nn.Module:
        """Its parameters, and no others, are optimised and kept in checkpoints."""

    def activate(self) -> None:
        """What is computed from now on is computed with it."""

    def write(self, folder: Path) -> None:
        """A policy version, for engines; of a sharded model in the main process, while the others `offer`."""

    def save(self, folder: Path) -> None:
        """The result, for `AutoModelForCausalLM.from_pretrained`; the others `offer`."""

    def offer(self) -> None:
        """Takes part while the main process writes or saves."""


@dataclass(frozen=True)
class WholeModel:
    policy: Policy
    is_sharded: bool
    tokenizer: Any

    @property
    def module(self) -> nn.Module:
        return self.policy

    def activate(self) -> None:
        """It always is."""

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
    """The model that it belongs to, by hub name or folder."""

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
