"""Drawing tokens: one uniform number per token from the request's own generator, by inverse CDF.

A request with a seed therefore gets the same tokens whatever else is in the batch. The logprobs that
come back are those of the distribution that was drawn from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.model import token_logprobs

_BLOCK = 256


def draw(
    logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draws a token per row, with its logprob; temperature 0: the likeliest, logprob at temperature 1."""
    device = logits.device
    scales = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
    logprobs = token_logprobs(logits, scales)
    tokens = _inverse_cdf(logprobs, torch.tensor(uniforms, dtype=torch.float64, device=device))
    if 0 in temperatures:
        greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()


def _inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Finds first the block of the vocabulary, then the token in it.

    Sums run in float64 where it matters: adding up a large vocabulary in float32 would starve the rare tokens
    at its end. With blocks, which add up a few hundred numbers each, only a small part has to be converted.
    """
    num_rows, vocab_size = logprobs.shape
    if vocab_size <= _BLOCK:
        masses = logprobs.double().exp()
        return _locate(masses, uniforms * masses.sum(-1))[0]
    num_blocks = -(-vocab_size // _BLOCK)
    padded = logprobs.new_zeros(num_rows, num_blocks * _BLOCK)
    torch.exp(logprobs, out=padded[:, :vocab_size])
    blocks = padded.view(num_rows, num_blocks, _BLOCK)
    masses = blocks.sum(-1).double()
    block, rest = _locate(masses, uniforms * masses.sum(-1))
    token, _ = _locate(blocks[torch.arange(num_rows, device=logprobs.device), block].double(), rest)
    return block * _BLOCK + token


def _locate(masses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the entry of each row in which its target falls, and how far into it: [2, 0, 3], 2.5 -> 2, 0.5.

    Never an entry without mass, whatever rounding did to the target.
    """
    ends = masses.cumsum(-1)
    total = ends[:, -1]
    inside = targets.minimum(torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(ends, inside, right=True).clamp_(max=masses.shape[1] - 1)
    starts = ends.gather(-1, index) - masses.gather(-1, index)
    return index[:, 0], (inside - starts).clamp_(min=0)[:, 0]
