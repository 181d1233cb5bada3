"""Hidden states -> log-probability of each token and entropy of its distribution, in float32.

The logits of a micro batch, one per token and word of the vocabulary, can take more memory than everything
else together. So they never exist all at once: tokens are predicted chunk by chunk. The backward pass
computes them again, for the tokens that a loss reads.

    forward     logits of a chunk -> logprobs, entropy          kept: one number each per token
    backward    logits of a chunk that is read, again -> gradients of hidden states and weight

A small micro batch keeps its logits instead of computing them twice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

MAX_LOGITS = 1 << 24
"""Logits that may be in memory at once."""

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


def token_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Computes log softmax(logits / temperature) over the vocabulary, for trainer and engine alike."""
    return torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)


def entropy_of(logprobs: Tensor) -> Tensor:
    with torch.no_grad():
        return -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)


def predict(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperatures: Tensor,
    read: Tensor,
    *,
    max_logits: int = MAX_LOGITS,
) -> TokenOutput:
    """Computes logprob and entropy of each token from the hidden state that predicts it.

    In chunks, only the rows `read` get a gradient.
    """
    targets = token_ids.long()
    if len(hidden) * len(weight) <= max_logits:
        logprobs = token_logprobs(linear(hidden, weight, bias), temperatures)
        return TokenOutput(_chosen(logprobs, targets), entropy_of(logprobs.detach()))
    chunk = max(1, max_logits // len(weight))
    arguments = (hidden, weight, bias, targets, temperatures, read, chunk)
    return TokenOutput(*_ChunkedHead.apply(*arguments))  # type: ignore[no-untyped-call]


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
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = torch.empty_like(temperatures), torch.empty_like(temperatures)
        for rows in torch.arange(len(hidden), device=hidden.device).split(chunk):
            logits = linear(hidden[rows], weight, bias).float()
            for some, part in zip(_blocks(rows, logits), _blocks(logits, logits), strict=True):
                predicted = token_logprobs(part, temperatures[some])
                logprobs[some] = _chosen(predicted, targets[some])
                entropy[some] = entropy_of(predicted)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, read, logprobs)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, read, logprobs = ctx.saved_tensors
        _, is_weight_trained, is_bias_trained, *_ = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if is_weight_trained else None
        of_bias = torch.zeros_like(bias) if is_bias_trained else None
        for rows in read.split(ctx.chunk):
            states = hidden[rows]
            logits = linear(states, weight, bias).float()
            for some, part in zip(_blocks(rows, logits), _blocks(logits, logits), strict=True):
                _differentiate(part, targets[some], temperatures[some], logprobs[some], gradient[some])
            of_logits = logits.to(weight.dtype)
            of_hidden[rows] = of_logits @ weight
            if of_weight is not None:
                of_weight.addmm_(of_logits.T, states)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _differentiate(
    logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor, gradient: Tensor
) -> None:
    """Replaces logits by their gradient: (1 at the target − probability) · gradient / temperature."""
    scaled = logits.div_(temperatures[:, None])
    log_sums = _chosen(scaled, targets) - logprobs
    scale = (gradient / temperatures)[:, None]
    scaled.sub_(log_sums[:, None]).exp_().mul_(-scale).scatter_add_(1, targets[:, None], scale)


def _blocks(rows: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Splits rows so that the logits of a block fit into a core's cache; on a GPU all rows are one block."""
    on_cpu = logits.device.type == "cpu"
    size = _IN_CACHE // logits.shape[1] if on_cpu else len(rows)
    blocks: tuple[Tensor, ...] = rows.split(max(1, size))
    return blocks
