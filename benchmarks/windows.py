"""Attention under a sliding window, forward and backward, against all tokens and HF's masked SDPA."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.result import Result, fastest_each_s
from pellucid.model import PackedAttention, Rule

HEADS, WIDTH = 4, 64
CASES = [(8192, 512), (4096, 512), (8192, 4096)]


def run() -> list[Result]:
    torch.set_num_threads(1)
    return [result for length, window in CASES for result in _compare(length, window)]


def _compare(length: int, window: int) -> list[Result]:
    plan = PackedAttention([length])
    query, key, value = torch.randn(3, 1, HEADS, length, WIDTH)
    places = torch.arange(length)
    mask = (places[None] <= places[:, None]) & (places[None] > places[:, None] - window)

    def under(rule: Rule) -> Callable[[], None]:
        return lambda: _train(lambda q, k, v: plan.attend(0, q, k, v, None, rule), query, key, value)

    def theirs() -> None:
        _train(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask), query, key, value)

    ours_s, full_s, their_s = fastest_each_s([under(Rule(window)), under(Rule()), theirs], repeats=4)
    name = f"a window of {window:,} in {length:,} tokens"
    return [
        Result(name, length / ours_s, length / full_s, "tok/s", "all tokens, causal SDPA"),
        Result(name, length / ours_s, length / their_s, "tok/s", "HF's way: SDPA with a mask"),
    ]


def _train(attend: Callable[..., Tensor], *given: Tensor) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    attend(*leaves).sum().backward()
