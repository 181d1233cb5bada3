"""Training on groups: the common prompt computed once against every member computing its own.

Over shapes of groups, ragged ones above all: sharing is there to save, and must never cost. Both sides take
turns, and what counts is the CPU time of the fastest turn, so that a busy machine finds the same ratios.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.result import Result
from benchmarks.shapes import made_policy
from pellucid.model import Layout, Policy, packed_layout, shared_layout


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Tokens of the prompt, and of each member behind it."""

    prompt: int
    own: tuple[int, ...]
    num_groups: int = 1


SHAPES = {
    "the demo's shape": GroupShape(25, (5, 9, 7, 6, 8, 5, 9, 7), num_groups=16),
    "long prompts": GroupShape(2000, (500,) * 8),
    "one long member": GroupShape(100, (1400, *(60,) * 7)),
    "one long member, long prompt": GroupShape(500, (1400, *(60,) * 7)),
    "ragged": GroupShape(200, (20, 40, 80, 160, 320, 640, 1000, 1400)),
    "ragged around the prompt's length": GroupShape(300, (100, 150, 200, 250, 300, 350, 400, 450)),
    "as long as the prompt": GroupShape(300, (300,) * 8),
    "short prompts": GroupShape(50, (400,) * 8),
    "very short prompts": GroupShape(10, (600,) * 8),
    "one token each": GroupShape(400, (1,) * 8),
    "pairs": GroupShape(60, (20, 90), num_groups=8),
    "a prompt of four tokens": GroupShape(4, (3, 9), num_groups=4),
    "many ragged groups": GroupShape(40, (5, 200, 12, 90), num_groups=8),
}


def run() -> list[Result]:
    torch.set_num_threads(1)
    with made_policy("tiny") as policy:
        return [_compare(policy, name, shape) for name, shape in SHAPES.items()]


def _compare(policy: Policy, name: str, shape: GroupShape) -> Result:
    lengths, flat, groups = drawn(shape, policy.vocab_size)
    our_s, their_s = _fastest_each_s(
        lambda: _train(policy, lengths, flat, shared_layout(lengths, flat, groups)),
        lambda: _train(policy, lengths, flat, packed_layout(lengths)),
    )
    tokens = len(flat)
    return Result(f"sharing, {name}", tokens / our_s, tokens / their_s, "tok/s", "every member on its own")


def drawn(shape: GroupShape, vocab_size: int) -> tuple[list[int], np.ndarray, list[str]]:
    """Lengths, tokens and groups of sequences of this shape."""
    generator = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [generator.randrange(5, vocab_size) for _ in range(number)]

    sequences, groups = [], []
    for group in range(shape.num_groups):
        prompt = tokens(shape.prompt)
        sequences += [prompt + tokens(own) for own in shape.own]
        groups += [str(group)] * len(shape.own)
    return list(map(len, sequences)), np.concatenate(sequences).astype(np.uint32), groups


def _train(policy: Policy, lengths: list[int], token_ids: np.ndarray, layout: Layout) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.from_numpy(token_ids.astype(np.int64))
    policy(ids, positions, torch.ones(len(ids)), layout).logprobs.mean().backward()
    policy.zero_grad(set_to_none=True)


def _fastest_each_s(*works: Callable[[], object], turns: int = 6) -> list[float]:
    """CPU seconds of the fastest turn of each, after one to warm up."""
    fastest = [float("inf")] * len(works)
    for turn in range(turns + 1):
        for index, work in enumerate(works):
            started = time.process_time()
            work()
            if turn:
                fastest[index] = min(fastest[index], time.process_time() - started)
    return fastest
