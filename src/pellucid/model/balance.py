"""The balancing loss of a model with experts: how unevenly the tokens of a step go to them.

    f_e    times that expert e is chosen, per token and router        a constant of the whole step
    P_e    mean probability of expert e, over tokens and routers      has the gradient
    loss   num_experts · Σ f_e P_e                                    top_k where all experts are equally busy

That is the formula of transformers (`load_balancing_loss_func`). It multiplies two means, so it is no sum
over micro batches. But the choice of experts has no gradient: once f is known for the whole step, the loss is
a sum over tokens. Micro batches, ranks and context-parallel slices add up to it, whatever the packing:

    loss = Σ_tokens Σ_routers Σ_e f_e p_e · num_experts / (tokens · routers)

Where the choice is counted by a forward, that forward draws the dropout of the one that trains: f and p are
of the same choices.

Tokens are those that predict a trainable token, so that the step's one denominator counts them. One whose
state stands for several, in a shared prompt, counts as often.
"""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.data.tensors import generators_of
from pellucid.errors import ModelError
from pellucid.model.layout import Layout

_KEY = "trainer.model.router_aux_loss_coef"

_SAME = 1e-5
"""Difference of two losses that rounding explains, relative to their size."""


class ExpertBalance:
    """Reads the logits of a model's routers, and computes each forward's share of the step's loss."""

    def __init__(self, hf: Any) -> None:
        routers = _routers_of(hf)
        config = hf.config.get_text_config()
        self.num_routers = len(routers)
        self.top_k = int(getattr(hf, "num_experts_per_tok", None) or config.num_experts_per_tok)
        self._fractions: Tensor | None = None
        self._num_tokens = 1
        self._read: dict[int, Tensor] | None = None
        self.is_counting = False
        """Whether a forward is under way that counts: it drops what the one that trains will drop."""

        self._draws: deque[list[Tensor]] = deque()
        """States of the random generators before each forward that counted, until it has trained."""
        self._check_formula(hf)
        for number, (router, index) in enumerate(routers):
            router.register_forward_hook(partial(self._keep, number, index))

    @property
    def is_begun(self) -> bool:
        """Whether the forwards of a step are under way: each gives its share of the loss."""
        return self._fractions is not None

    @contextmanager
    def step(self, counts: Tensor, num_tokens: int) -> Iterator[None]:
        """Context manager: forwards inside belong to a step of `num_tokens` trainable tokens, in which expert
        e is chosen `counts[e]` times."""
        self._fractions, self._num_tokens = counts / (num_tokens * self.num_routers), num_tokens
        try:
            yield
        finally:
            self._fractions = None
            self._draws.clear()

    @contextmanager
    def reading(self) -> Iterator[dict[int, Tensor]]:
        """Context manager: collects the logits of the forward inside, by router. A layer that is computed
        again for its backward pass comes later, and is not collected."""
        self._read = {}
        try:
            yield self._read
        finally:
            self._read = None

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[dict[int, Tensor]]:
        """Context manager: collects the logits of the forward inside, which draws the dropout of the one that
        trains the same tokens."""
        self._draws.append([generator.get_state() for generator in generators_of(device)])
        self.is_counting = True
        try:
            with self.reading() as logits:
                yield logits
        finally:
            self.is_counting = False

    def repeat_draws(self, device: torch.device) -> None:
        """Makes the next forward draw what the first that counted, and has not trained yet, has drawn."""
        if self._draws:
            for generator, state in zip(generators_of(device), self._draws.popleft(), strict=True):
                generator.set_state(state)

    def count(self, logits: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Counts how often routers choose each expert; a token counts `weights` times."""
        chosen = [
            self._probabilities(each).topk(self.top_k, dim=-1).indices for each in self._ordered(logits)
        ]
        num_experts = logits[0].shape[-1]
        return count_experts(torch.stack(chosen, dim=1), weights, num_experts)

    def share(self, logits: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Computes what the tokens of a forward add to the step's loss; it has a gradient."""
        assert self._fractions is not None, "a share is one of a step"
        pushed = [weights @ (self._probabilities(each) @ self._fractions) for each in self._ordered(logits)]
        scale = len(self._fractions) / (self._num_tokens * self.num_routers)
        return torch.stack(pushed).sum() * scale

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float(), dim=-1)

    def _ordered(self, logits: dict[int, Tensor]) -> list[Tensor]:
        if len(logits) != self.num_routers:
            raise ModelError(
                f"{_KEY}: {len(logits)} of {self.num_routers} routers were asked in a forward; set it to 0"
            )
        return [logits[number] for number in range(self.num_routers)]

    def _check_formula(self, hf: Any) -> None:
        """Raises ModelError unless the family's loss is the formula above, for logits drawn at random."""
        generator = torch.Generator().manual_seed(0)
        num_tokens, num_experts = 7, self.top_k + 3
        drawn = torch.randn(self.num_routers, num_tokens, num_experts, generator=generator)
        logits, weights = dict(enumerate(drawn)), torch.ones(num_tokens)
        with self.step(self.count(logits, weights), num_tokens):
            own = self.share(logits, weights)
        formula = sys.modules[type(hf).__module__].load_balancing_loss_func
        try:
            theirs = formula(tuple(drawn), num_experts=num_experts, top_k=self.top_k)
        except (TypeError, ValueError, RuntimeError, IndexError):
            theirs = torch.nan
        if not abs(float(own) - float(theirs)) <= _SAME * self.top_k:
            raise ModelError(
                f"{_KEY} is set, but the balancing loss of {type(hf).__name__} is another than that of "
                "Qwen3-MoE and Mixtral, which pellucid computes; set it to 0, or choose a model with such "
                "experts"
            )

    def _keep(self, number: int, index: int, router: nn.Module, inputs: object, output: Any) -> None:
        if self._read is not None:
            logits = output if isinstance(output, Tensor) else output[index]
            self._read[number] = logits.flatten(0, -2)


def count_experts(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Counts experts of [tokens, routers, top_k]; a token counts `weights` times, one of -1 not at all."""
    wide = weights[:, None, None].expand(chosen.shape)
    is_known = chosen >= 0
    counted = torch.where(is_known, wide, 0.0).flatten()
    places = chosen.long().clamp(min=0).flatten()
    return weights.new_zeros(num_experts).index_add(0, places, counted)


def predicting(layout: Layout, trainable: Tensor) -> Tensor:
    """Counts how many trainable tokens the state of each computed token predicts, on this process."""
    num_predictions = len(layout.predicted) if layout.own is None else layout.own.num_rows
    predicted = torch.zeros(num_predictions, device=trainable.device)
    predicted = predicted.index_add(0, layout.sources, trainable[layout.targets].float())
    if layout.own is not None:
        predicted = predicted[layout.own.rows]
    counted = torch.zeros(len(layout.computed), device=trainable.device)
    return counted.index_add(0, layout.predecessors, predicted)


def _routers_of(hf: Any) -> list[tuple[nn.Module, int]]:
    """Finds the routers whose logits transformers' balancing loss of this family reads, and where in their
    output they are. JetMoE's of attention are there twice, as they are in its loss."""
    recorders: Any = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits") or []
    routers = [
        (module, int(recorder.index))
        for recorder in (recorders if isinstance(recorders, list) else [recorders])
        for module in hf.modules()
        if isinstance(module, recorder.target_class)
    ]
    if not routers or not hasattr(sys.modules[type(hf).__module__], "load_balancing_loss_func"):
        raise ModelError(
            f"{_KEY} is set, but transformers has no balancing loss for {type(hf).__name__}; set it to 0, or "
            "choose a model with such experts (Qwen3-MoE, Mixtral, OLMoE, gpt-oss, …)"
        )
    return routers
