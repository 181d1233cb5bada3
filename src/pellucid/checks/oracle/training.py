"""One optimizer step in float64: logprobs, gradient, clipping, AdamW.

The model is Hugging Face's own, called on one sequence at a time with its own attention and its own causal
mask. Its parameters are handed to it by name (`torch.func.functional_call`), so that an adapter is nothing
but W + scale · B·A in place of W.

    loss of the step = Σ over sequences of weight · Σ token losses ÷ trainable tokens of the step

The derivative of every token loss with respect to log π is known by formula; backward passes the vector of
these derivatives through the model, and through nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pellucid.checks.oracle.losses import TokenLosses, loss_weights_of, token_losses

Tensors = dict[str, Tensor]

ADAMW_EPS = 1e-8
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ReferenceSequence:
    """One sample as it trains: truncated already, with one value per token."""

    token_ids: Sequence[int]
    trainable: NDArray[np.bool_]
    log_mu: NDArray[np.float64]
    advantages: NDArray[np.float64]
    temperatures: NDArray[np.float64]
    mode: str = "rl"
    group: str = ""
    teacher: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class ReferenceStep:
    """The results of one step; lists have one entry per sequence."""

    logprobs: list[NDArray[np.float64]]
    entropies: list[NDArray[np.float64]]
    losses: list[TokenLosses]
    """Before weighting."""

    weights: list[float]
    denominator: int
    loss: float
    gradients: Tensors
    grad_norm: float
    largest_part: float
    """The largest entry of the gradients that the two parts of log π = logit − normaliser give by themselves.
    Where π is almost 1, they cancel: what is left is smaller than their rounding."""


@dataclass
class AdamWState:
    """Moments of every parameter."""

    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)
    num_updates: int = 0


class Float64Everywhere(TorchFunctionMode):
    """Context: where a model asks for float32 (norms, softmax, rotary angles), it computes in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wider = {torch.float32: torch.float64}
        args = [wider.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        kwargs = {
            key: wider.get(each, each) if isinstance(each, torch.dtype) else each
            for key, each in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


class ReferenceModel:
    """A causal language model in float64, whose trained parameters change by `adamw_step` alone."""

    def __init__(self, name: str, trained: Mapping[str, Tensor], *, lora_scale: float = 1.0) -> None:
        """`trained`: initial values by the names in Hugging Face's files, tied parameters once; or those of
        an adapter by the names in PEFT's, and `lora_scale` = alpha ÷ rank."""
        from transformers import AutoModelForCausalLM

        self._hf: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._hf.requires_grad_(False)
        self._fixed = {key: value.detach() for key, value in self._hf.named_parameters()}
        self._lora_scale = lora_scale
        self.parameters: Tensors = {
            key: value.detach().to("cpu", torch.float64, copy=True) for key, value in trained.items()
        }

    def initial(self, seed: int) -> Tensors:
        """The weights that training starts from: the model's own, or an adapter whose A is drawn from `seed`
        in the order of names, uniform within 1/√inputs, and whose B is 0."""
        generator, found = torch.Generator().manual_seed(seed), {}
        for name, value in sorted(self.parameters.items()):
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(value.shape[1])
                drawn = torch.empty(value.shape).uniform_(-bound, bound, generator=generator)
                found[name] = drawn.double()
            elif name.startswith(PEFT_PREFIX):
                found[name] = torch.zeros_like(value)
            elif name in self._fixed:  # files of some models have other names
                found[name] = self._fixed[name]
        return found

    def likeliest(self, token_ids: Sequence[int]) -> int:
        """Finds the token that follows with the highest probability."""
        return int(self._logits(token_ids, self.parameters)[-1].argmax())

    def top_probability(self, token_ids: Sequence[int], temperature: float) -> float:
        """Computes the probability of the likeliest next token."""
        return float((self._logits(token_ids, self.parameters)[-1] / temperature).softmax(-1).max())

    def _logits(self, token_ids: Sequence[int], parameters: Tensors) -> Tensor:
        inputs = {"input_ids": torch.tensor([list(token_ids)]), "use_cache": False}
        with Float64Everywhere():
            output = torch.func.functional_call(self._hf, self._weights(parameters), kwargs=inputs)
        logits: Tensor = output.logits[0]
        return logits

    def logprobs(
        self, token_ids: Sequence[int], temperatures: NDArray[np.float64], parameters: Tensors | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes log π and the entropy of every token; nothing predicts the first one, so it is uniform."""
        log_pi, entropy, _ = self._predicted(
            token_ids, temperatures, self.parameters if parameters is None else parameters
        )
        return log_pi, entropy

    def _predicted(
        self, token_ids: Sequence[int], temperatures: NDArray[np.float64], parameters: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes log π, the entropy and the logit of every token, the last of them over its temperature."""
        logits = self._logits(token_ids, parameters)
        scaled = logits[:-1] / torch.as_tensor(temperatures, dtype=torch.float64)[1:, None]
        log_all = scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)
        targets = torch.tensor(token_ids)[1:, None]
        entropy = -(log_all.exp() * log_all).sum(-1)
        uniform = torch.full((1,), math.log(logits.shape[-1]), dtype=torch.float64)
        none = torch.zeros(1, dtype=torch.float64)
        return (
            torch.cat([-uniform, log_all.gather(1, targets)[:, 0]]),
            torch.cat([uniform, entropy]),
            torch.cat([none, scaled.gather(1, targets)[:, 0]]),
        )

    def _weights(self, parameters: Tensors) -> Tensors:
        """The weights to compute with: an adapted one is W + scale · B·A."""
        weights = dict(self._fixed)
        for name, value in parameters.items():
            if not name.startswith(PEFT_PREFIX):
                weights[name] = value
            elif name.endswith(".lora_A.weight"):
                adapted = name.removeprefix(PEFT_PREFIX).replace(".lora_A.", ".")
                factor = parameters[name.replace(".lora_A.", ".lora_B.")]
                update = factor @ value
                layer = self._hf.get_submodule(adapted.removesuffix(".weight"))
                if type(layer).__name__ == "Conv1D":  # whose weight is [inputs, outputs]
                    update = update.T
                weights[adapted] = self._fixed[adapted] + self._lora_scale * update
        return weights

    def step(
        self, sequences: Sequence[ReferenceSequence], loss: Mapping[str, Any], reduction: str
    ) -> ReferenceStep:
        """Computes everything about a step but its update."""
        numbers = [int(each.trainable.sum()) for each in sequences]
        weights = loss_weights_of(
            reduction, numbers, [each.group for each in sequences], [each.mode for each in sequences]
        )
        denominator = max(1, sum(numbers))
        moving = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
        logprobs, entropies, losses = [], [], []
        total = largest_part = 0.0
        for each, weight in zip(sequences, weights, strict=True):
            log_pi, entropy, chosen = self._predicted(each.token_ids, each.temperatures, moving)
            found = token_losses(
                each.mode,
                loss,
                log_pi=log_pi.detach().numpy(),
                log_mu=each.log_mu,
                advantages=each.advantages,
                trainable=each.trainable,
                lengths=[len(each.token_ids)],
                teacher=each.teacher,
            )
            if log_pi.requires_grad:
                slope = torch.from_numpy(found.slope * weight / denominator)
                parts = torch.autograd.grad(
                    chosen, list(moving.values()), slope.abs(), retain_graph=True, allow_unused=True
                )
                largest_part += max(float(part.abs().max()) for part in parts if part is not None)
                log_pi.backward(slope)
            total += weight * float(found.loss.sum())
            logprobs.append(log_pi.detach().numpy())
            entropies.append(entropy.detach().numpy())
            losses.append(found)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in moving.items()
        }
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        mean = total / denominator
        return ReferenceStep(
            logprobs, entropies, losses, weights, denominator, mean, gradients, norm, largest_part
        )


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, max_steps: int) -> float:
    """Computes the learning rate of a step, numbered from 0: a linear rise, then the schedule."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return peak * {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]


def clip_factor(norm: float, max_norm: float) -> float:
    """Computes by what a gradient of this norm is scaled down; 1 if it is short enough.

    torch adds 1e-6 to the norm before it divides.
    """
    return min(1.0, max_norm / (norm + 1e-6))


def adamw_step(
    parameters: Tensors,
    gradients: Mapping[str, Tensor],
    state: AdamWState,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Tensors:
    """Returns the parameters after one update; changes `state` (Loshchilov and Hutter, algorithm 2)."""
    state.num_updates += 1
    updated = {}
    for name, weight in parameters.items():
        gradient = gradients[name]
        first = betas[0] * state.first.get(name, torch.zeros_like(weight)) + (1 - betas[0]) * gradient
        second = betas[1] * state.second.get(name, torch.zeros_like(weight)) + (1 - betas[1]) * gradient**2
        state.first[name], state.second[name] = first, second
        mean = first / (1 - betas[0] ** state.num_updates)
        size = (second / (1 - betas[1] ** state.num_updates)).sqrt()
        updated[name] = weight * (1 - lr * weight_decay) - lr * mean / (size + ADAMW_EPS)
    return updated
