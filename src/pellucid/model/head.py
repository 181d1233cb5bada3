"""Hidden states -> log-probability of each token and entropy of its distribution, in float32.

The logits of a micro batch, one per token and word of the vocabulary, can take more memory than everything
else together. So they never exist all at once: tokens are predicted chunk by chunk. The backward pass
computes them again, for the tokens that a loss reads.

    forward     logits of a chunk -> logprobs, entropy          kept: one number each per token
    backward    logits of a chunk that is read, again -> gradients of hidden states and weight

A small micro batch keeps its logits instead of computing them twice.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.model.linear import linear

MAX_LOGITS = 1 << 24
"""Logits that may be in memory at once on a CPU, and that any device keeps for the backward pass."""

_LOGIT_BYTES = 8
"""Most bytes that a logit takes while it is in memory: two numbers in float32."""

_MEMORY_SHARE = 1 / 16
"""Share of a GPU's memory that logits may take. Each chunk reads the whole weight of the head, so few large
chunks are fast: with 80 GB and a vocabulary of 128,256, a chunk has 4,873 tokens."""

_IN_CACHE = 1 << 19
"""Logits that a core's cache holds; elementwise operations on as many are ten times faster than on more."""


class TokenOutput(NamedTuple):
    """Predictions of a micro batch, per token. The first token of a sequence has none: log(1/V) and log V.

    A tuple, because FSDP looks for the tensors of an output in tuples only.
    """

    logprobs: Tensor
    entropy: Tensor
    """Entropy in nats, without gradient: it is observed, not optimised."""

    replaced: Tensor | None = None
    """Share of experts that router replay replaced, over all layers, for the token that predicts this one.
    Without gradient; None without router replay."""

    balance: Tensor | None = None
    """Share of these tokens in the step's balancing loss, one number; None without such a loss."""


def token_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Computes log softmax(logits / temperature) over the vocabulary, for trainer and engine alike."""
    return torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)


def entropy_of(logprobs: Tensor) -> Tensor:
    with torch.no_grad():
        return -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)


def max_logits_on(device: torch.device) -> int:
    """Returns how many logits may be in memory at once: on a GPU, by its memory."""
    if device.type == "cpu":
        return MAX_LOGITS
    memory = torch.get_device_module(device).get_device_properties(device).total_memory
    return int(memory * _MEMORY_SHARE) // _LOGIT_BYTES


def predict(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperatures: Tensor,
    read: Tensor,
    *,
    max_logits: int | None = None,
    softcap: float | None = None,
) -> TokenOutput:
    """Computes logprob and entropy of each token from the hidden state that predicts it.

    With `softcap`, a logit is cap · tanh(logit / cap) before the temperature divides it.

    In chunks, only the rows `read` get a gradient. There are chunks if the logits are more than `max_logits`,
    or than the device's memory should hold.
    """
    targets = token_ids.long()
    max_logits = max_logits or max_logits_on(hidden.device)
    if len(hidden) * len(weight) <= min(max_logits, MAX_LOGITS):
        logprobs = token_logprobs(capped(linear(hidden, weight, bias), softcap), temperatures)
        # No view: FSDP hooks what a module returns, and operations in place on a view would drop the hook.
        return TokenOutput(_chosen(logprobs, targets).clone(), entropy_of(logprobs.detach()))
    chunk = max(1, max_logits // len(weight))
    arguments = (hidden, weight, bias, targets, temperatures, read, chunk, softcap)
    return TokenOutput(*_ChunkedHead.apply(*arguments))  # type: ignore[no-untyped-call]


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits.float() / softcap) * softcap


def _chosen(logprobs: Tensor, targets: Tensor) -> Tensor:
    return logprobs.gather(-1, targets[:, None])[:, 0]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        read: Tensor,
        size: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        per_token = (hidden, targets, temperatures)
        parts = [_predict_chunk(weight, bias, softcap, *chunk) for chunk in _chunks(size, *per_token)]
        logprobs, entropy = (torch.cat(part) for part in zip(*chain.from_iterable(parts), strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, read, logprobs)
        ctx.size, ctx.softcap = size, softcap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, read, logprobs = ctx.saved_tensors
        _, is_weight_trained, is_bias_trained, *_ = ctx.needs_input_grad
        of_weight = torch.zeros_like(weight, dtype=_wide(weight)) if is_weight_trained else None
        of_bias = torch.zeros_like(bias, dtype=_wide(bias)) if is_bias_trained else None
        per_row = (targets, temperatures, logprobs, gradient / temperatures)
        states = hidden[read]
        of_states = torch.empty_like(states)
        per_read = (states, of_states, *(each[read] for each in per_row))
        for own, of_own, *given in _chunks(ctx.size, *per_read):
            of_logits = _logit_gradients(weight, bias, ctx.softcap, own, *given)
            torch.mm(of_logits, weight, out=of_own)
            if of_weight is not None:
                _add_product(of_weight, of_logits.T, own)
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=of_bias.dtype)
            del of_logits  # before those of the next chunk exist
        of_hidden = torch.zeros_like(hidden).index_copy_(0, read, of_states)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _predict_chunk(
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Computes logprobs and entropies, block by block. At most two numbers per logit exist at once."""
    found = []
    logits = linear(hidden, weight, bias).float()
    for part, words, heat in _blocks(logits, targets, temperatures):
        if softcap is not None:
            part.div_(softcap).tanh_().mul_(softcap)
        logprobs = torch.log_softmax(part.div_(heat[:, None]), dim=-1)
        chosen = _chosen(logprobs, words)
        probabilities = torch.exp(logprobs, out=part)
        found.append((chosen, -probabilities.mul_(logprobs.nan_to_num_(neginf=0.0)).sum(-1)))
        del logprobs  # before those of the next block exist
    return found


def _logit_gradients(
    weight: Tensor, bias: Tensor | None, softcap: float | None, hidden: Tensor, *per_row: Tensor
) -> Tensor:
    """Computes the gradients of a chunk's logits, in the dtype of the weight."""
    logits = linear(hidden, weight, bias).float()
    for part, *given in _blocks(logits, *per_row):
        if softcap is None:
            _differentiate(part, *given)
        else:
            slope = 1 - part.div_(softcap).tanh_().square()
            _differentiate(part.mul_(softcap), *given)
            part.mul_(slope)
    return logits.to(weight.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which gradients of a tensor add up, over chunks: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left · right to a total of float32 at least; a product in bfloat16 is not rounded before."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cpu":  # which has no such kernel
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def _differentiate(
    logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor, scale: Tensor
) -> None:
    """Replaces logits by their gradient: (1 at the target − probability) · scale."""
    scaled = logits.div_(temperatures[:, None])
    log_sums = _chosen(scaled, targets) - logprobs
    added = scale[:, None]
    scaled.sub_(log_sums[:, None]).exp_().mul_(-added).scatter_add_(1, targets[:, None], added)


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of equal length into chunks of rows."""
    yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _blocks(logits: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts a chunk so that the logits of a block fit into a core's cache; on a GPU it is one block."""
    size = _IN_CACHE // logits.shape[1] if logits.device.type == "cpu" else len(logits)
    return _chunks(max(1, size), logits, *tensors)
