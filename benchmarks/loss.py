"""The rl loss over a packed micro batch: all tokens at once against one sequence after the other.

Forward and backward of 32,768 tokens, values and decisions of every token, one thread. The loop sees the very
same tokens, a slice per sequence, and sums the token losses at the end.
"""

import torch
from torch import Tensor

from benchmarks.result import Result, fastest_each_s
from pellucid.config import DppoLossConfig
from pellucid.loss import LossInputs, Ratios, dppo_loss
from pellucid.workers import keep_freed_memory

TOKENS = 32_768
_CONFIG = DppoLossConfig()


def run() -> list[Result]:
    torch.set_num_threads(1)
    keep_freed_memory()  # as the trainer does
    return [_compare(num_sequences) for num_sequences in (12, 200)]


def _compare(num_sequences: int) -> Result:
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(num_sequences, generator=generator) + 0.2
    lengths = (shares / shares.sum() * TOKENS).long()
    lengths[-1] += TOKENS - lengths.sum()
    sizes: list[int] = lengths.tolist()
    sampled = -torch.rand(TOKENS, generator=generator)
    trainer = (sampled + 0.3 * torch.randn(TOKENS, generator=generator)).clamp(max=0)
    advantages = torch.randn(num_sequences, generator=generator).repeat_interleave(lengths)
    mask = torch.rand(TOKENS, generator=generator) > 0.25

    def packed() -> None:
        _total(trainer.clone().requires_grad_(), sampled, advantages, mask, sizes=sizes).backward()

    def looped() -> None:
        logprobs = trainer.clone().requires_grad_()
        parts = [column.split(sizes) for column in (logprobs, sampled, advantages, mask)]
        losses = [_total(*each, sizes=[len(each[0])]) for each in zip(*parts, strict=True)]
        torch.stack(losses).sum().backward()

    our_s, their_s = fastest_each_s([packed, looped])
    name = f"loss, {num_sequences} sequences"
    return Result(name, TOKENS / our_s, TOKENS / their_s, "tok/s", "a loop over sequences")


def _total(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor, *, sizes: list[int]
) -> Tensor:
    inputs = LossInputs(logprobs, sampled, advantages, mask, None, Ratios.of(logprobs, sampled), sizes)
    return dppo_loss(inputs, _CONFIG).token_loss.sum()
