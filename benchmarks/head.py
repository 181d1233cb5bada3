"""Logprobs and entropy of 2,048 tokens over a vocabulary of 151,936: in chunks against all logits at once.

Forward and backward to hidden states and weight, one thread, the hidden width of a model of 135 million
parameters. Memory is what a process takes at its peak beyond what it had before; each side has its own.
"""

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.result import Result, fastest_each_s
from pellucid.model.head import entropy_of, predict, token_logprobs

TOKENS, VOCABULARY, WIDTH = 2048, 151_936, 576
UNREAD = 0.25
_REPEATS = 3


class Case:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
        self.weight = torch.empty(VOCABULARY, WIDTH).normal_(std=0.05, generator=generator).requires_grad_()
        self.token_ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        self.temperatures = torch.rand(TOKENS, generator=generator) + 0.5
        self.is_read = torch.rand(TOKENS, generator=generator) >= UNREAD

    def chunked(self, read: Tensor | None = None) -> None:
        rows = torch.arange(TOKENS) if read is None else read
        output = predict(self.hidden, self.weight, None, self.token_ids, self.temperatures, rows)
        self._backward(output.logprobs)

    def chunked_in_part(self) -> None:
        self.chunked(self.is_read.nonzero()[:, 0])

    def full(self) -> None:
        logprobs = token_logprobs(self.hidden @ self.weight.T, self.temperatures)
        entropy_of(logprobs.detach())
        self._backward(logprobs.gather(-1, self.token_ids[:, None])[:, 0])

    def _backward(self, logprobs: Tensor) -> None:
        logprobs.sum().backward()
        self.hidden.grad = self.weight.grad = None


def run() -> list[Result]:
    ours, theirs = _peak("chunked"), _peak("full")
    case = Case()
    part_s, our_s, their_s = fastest_each_s([case.chunked_in_part, case.chunked, case.full], _REPEATS)
    return [
        Result("head, peak memory", ours, theirs, "bytes", "all logits at once"),
        Result("head, speed", TOKENS / our_s, TOKENS / their_s, "tok/s", "all logits at once"),
        Result("head, a quarter unread", TOKENS / part_s, TOKENS / our_s, "tok/s", "all tokens read"),
    ]


def _peak(side: str) -> int:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, side).result()


def _measure(side: str) -> int:
    case = Case()
    work: Callable[[], None] = getattr(case, side)
    before = _peak_bytes()
    work()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
