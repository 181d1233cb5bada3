"""The experts that a token is sent to: recorded by the engine, replayed by the trainer.

    engine     router ──> its own scores ──> the best top_k experts                    recorded
    trainer    router ──> its own scores ──> those of the recorded experts             replayed

Engine and trainer never compute bit by bit the same. Where two experts score almost alike, rounding is enough
to change the choice, and the logprob of a token jumps. Replay takes only the choice from the record: the
experts' weights are the trainer's own scores, renormalised where the model does that, so that gradients flow
into the router as they do without replay. If the weights are recorded and replayed, too, they are constants,
and the router's gradient is 0.

Experts are [tokens, layers, top_k]; layers are those that have a router, in their order. A token whose
experts are -1 (padding) goes where the router sends it.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pellucid.data import COLUMNS, PackedArray
from pellucid.data.rules import Experts
from pellucid.errors import ModelError

_KNOWN = ("OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Router classes that take a softmax over all experts, then the top_k, renormalised if `norm_topk_prob`, and
return (logits, scores of the chosen experts, chosen experts)."""


@dataclass(frozen=True, slots=True)
class RouterShape:
    num_layers: int
    """Layers with a router."""

    top_k: int
    num_experts: int
    has_weights: bool = False
    """Whether the weights of experts are recorded, too."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype of the column `routed_experts` that holds an expert's number."""
        column = COLUMNS["routed_experts"]
        assert column.narrow is not None
        fits = self.num_experts - 1 <= np.iinfo(column.narrow).max
        return np.dtype(column.narrow if fits else column.dtype)

    @property
    def experts(self) -> Experts:
        return self.num_layers, self.top_k, self.num_experts

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's experts, over all layers: their numbers, then their weights as float32."""
        return self.num_layers * self.top_k * (self.dtype.itemsize + (4 if self.has_weights else 0))

    def pack(self, recorded: bytes | bytearray) -> tuple[PackedArray, PackedArray | None]:
        """Packs the recorded bytes of consecutive tokens into one array, and one of the weights."""
        num_tokens = len(recorded) // self.num_bytes
        shape = num_tokens, self.num_layers, self.top_k
        if not self.has_weights:
            return PackedArray(bytes(recorded), shape, self.dtype.name), None
        rows = np.frombuffer(recorded, np.uint8).reshape(num_tokens, self.num_bytes)
        chosen, weights = np.split(rows, [self.num_layers * self.top_k * self.dtype.itemsize], axis=1)
        return (
            PackedArray(chosen.tobytes(), shape, self.dtype.name),
            PackedArray(weights.tobytes(), shape, "float32"),
        )


def routers_of(hf: nn.Module, key: str) -> list[Any]:
    """Lists the routers in the order of their layers; errors name `key`, the setting that needs them."""
    routers = known_routers(hf)
    if not routers:
        raise ModelError(
            f"{key} = true, but {type(hf).__name__} has no routers that pellucid knows "
            f"({', '.join(_KNOWN)}); leave it out, or choose a model with such experts"
        )
    return routers


def known_routers(hf: nn.Module) -> list[Any]:
    return [module for module in hf.modules() if type(module).__name__ in _KNOWN]


def routed_layers(hf: nn.Module, routers: list[Any]) -> list[int]:
    """Returns the numbers of the decoder layers that these routers are in: "model.layers.3.mlp.gate" -> 3."""
    names = {module: name for name, module in hf.named_modules()}
    found = [re.search(r"\.(\d+)\.", names[router]) for router in routers]
    return [int(match[1]) for match in found if match]


def router_shape(routers: list[Any]) -> RouterShape:
    return RouterShape(len(routers), routers[0].top_k, routers[0].num_experts)


class ExpertRecorder:
    """Records the experts that the routers of a model chose in its last forward, and their `weights` if they
    are asked for."""

    def __init__(self, hf: nn.Module, *, weights: bool = False) -> None:
        routers = routers_of(hf, "inference.record_experts")
        self.shape = replace(router_shape(routers), has_weights=weights)
        self._chosen: list[Tensor] = [torch.empty(0)] * len(routers)
        self._weights: list[Tensor] = [torch.empty(0)] * len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._keep, layer))

    def last(self) -> Tensor:
        """Returns the experts of the last forward, [tokens, layers, top_k], as numbers of `shape.dtype`; with
        weights, all bytes of each token, [tokens, num_bytes]."""
        chosen = torch.stack(self._chosen, dim=1).to(getattr(torch, self.shape.dtype.name))
        if not self.shape.has_weights:
            return chosen
        weights = torch.stack(self._weights, dim=1).float()
        return torch.cat([each.flatten(1).view(torch.uint8) for each in (chosen, weights)], dim=1)

    def _keep(self, layer: int, router: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        _, self._weights[layer], self._chosen[layer] = output


class ReplayedExperts:
    """The recorded experts of one forward, and how many of them the routers would not have chosen."""

    def __init__(self, recorded: Tensor, shape: RouterShape, weights: Tensor | None = None) -> None:
        self.recorded = recorded
        self.weights = weights
        """Recorded weights of the experts; None: the routers weigh them."""

        self._num_replaced = torch.zeros(len(recorded), device=recorded.device)
        self._num_experts = shape.num_layers * shape.top_k

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Returns the recorded experts of each token, or the router's own choice where they are -1."""
        recorded = self.recorded[:, layer].long()
        chosen = torch.where(recorded < 0, own, recorded)
        is_own = (chosen[:, :, None] == own[:, None, :]).any(2)
        self._num_replaced += (~is_own).sum(1)
        return chosen

    def weigh(self, layer: int, own: Tensor) -> Tensor:
        """Returns the recorded weights of each token's experts, or `own` where they are NaN or not replayed.

        The graph always leads to `own`, whose gradient is 0 where the record replaces it: all processes of a
        sharded model reduce the same gradients.
        """
        if self.weights is None:
            return own
        recorded = self.weights[:, layer].to(own.dtype)
        return torch.where(recorded.isnan(), own, recorded)

    def share_replaced(self) -> Tensor:
        """Computes the share of replaced experts per token, over all layers."""
        return self._num_replaced / self._num_experts


class ExpertReplay:
    """Sends tokens to recorded experts instead of those that the routers of a model choose; with `weights`,
    they have the recorded weights, too."""

    def __init__(self, hf: nn.Module, *, weights: bool = False) -> None:
        routers = routers_of(hf, "trainer.enable_router_replay")
        self.shape = replace(router_shape(routers), has_weights=weights)
        self._now: ReplayedExperts | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._replay, layer))

    @contextmanager
    def of(self, recorded: Tensor, weights: Tensor | None = None) -> Iterator[ReplayedExperts]:
        """Context manager: a forward inside sends its tokens to the `recorded` experts, by these weights."""
        if self.shape.has_weights and weights is None:
            raise ModelError("forward without weights of experts, though trainer.replay_expert_weights is on")
        replayed = ReplayedExperts(recorded, self.shape, weights if self.shape.has_weights else None)
        before, self._now = self._now, replayed
        try:
            yield self._now
        finally:
            self._now = before

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Makes contexts for `torch.utils.checkpoint`: a repeated forward takes the same experts."""
        now = self._now
        return nullcontext(), nullcontext() if now is None else self.of(now.recorded, now.weights)

    def _replay(
        self, layer: int, router: Any, inputs: object, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        logits, _, own = output
        if self._now is None:
            raise ModelError("forward without recorded experts, though trainer.enable_router_replay is on")
        chosen = self._now.choose(layer, own)
        scores = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
        if router.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, self._now.weigh(layer, scores.to(logits.dtype)), chosen
