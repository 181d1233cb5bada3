"""Logits -> log-probability of each token and entropy of the distribution it was drawn from, in float32."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Per token of a micro batch. The first token of a sequence has no prediction: log(1/V) and log V."""

    logprobs: Tensor
    entropy: Tensor
    """Without gradient: it is observed, not optimised."""


def token_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(logits / temperature) over the vocabulary; trainer and engine both come through here."""
    return torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)


def entropy_of(logprobs: Tensor) -> Tensor:
    with torch.no_grad():
        return -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)


def unpredicted(num_tokens: int, vocab_size: int, device: torch.device) -> TokenOutput:
    """The values of tokens that nothing predicts."""
    uniform = math.log(vocab_size)
    return TokenOutput(
        torch.full((num_tokens,), -uniform, device=device),
        torch.full((num_tokens,), uniform, device=device),
    )
