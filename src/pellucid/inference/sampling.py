"""Drawing tokens: one uniform number per token from the request's own generator, by inverse CDF.

A request with a seed therefore gets the same tokens whatever else is in the batch. The logprobs that
come back are those of the distribution that was drawn from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.model import token_logprobs


def draw(
    logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Token and logprob per row; temperature 0 takes the likeliest token, its logprob at temperature 1."""
    greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=logits.device)
    scales = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits.device)
    logprobs = token_logprobs(logits, scales)
    # In float64: summing a large vocabulary in float32 would starve the rare tokens at its end.
    cumulative = logprobs.double().exp().cumsum(-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    tokens = torch.where(greedy, logprobs.argmax(-1), sampled)
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
