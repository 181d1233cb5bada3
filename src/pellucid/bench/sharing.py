"""Training on groups: the common prompt computed once against every member computing its own."""

import random

import numpy as np
import torch

from pellucid.bench.result import Result, fastest_s
from pellucid.bench.shapes import made_policy
from pellucid.model import Layout, Policy, packed_layout, shared_layout

CASES = {"the demo's shape": (16, 8, 25, (5, 9)), "long prompts": (1, 8, 2000, (500, 500))}
"""Groups, members, prompt tokens, completion tokens from and to."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    with made_policy("tiny") as policy:
        return [_compare(policy, name, *shape) for name, shape in CASES.items()]


def _compare(
    policy: Policy, name: str, num_groups: int, members: int, prompt: int, completion: tuple[int, int]
) -> Result:
    generator = random.Random(0)
    sequences, groups = [], []
    for group in range(num_groups):
        common = [generator.randrange(5, policy.vocab_size) for _ in range(prompt)]
        for _ in range(members):
            length = generator.randint(*completion)
            sequences.append(common + [generator.randrange(5, policy.vocab_size) for _ in range(length)])
            groups.append(str(group))
    lengths = [len(sequence) for sequence in sequences]
    flat = np.array([token for sequence in sequences for token in sequence], np.uint32)
    our_s = fastest_s(lambda: _train(policy, lengths, flat, shared_layout(lengths, flat, groups)), 3)
    their_s = fastest_s(lambda: _train(policy, lengths, flat, packed_layout(lengths)), 3)
    tokens = len(flat)
    return Result(f"sharing, {name}", tokens / our_s, tokens / their_s, "tok/s", "every member on its own")


def _train(policy: Policy, lengths: list[int], token_ids: np.ndarray, layout: Layout) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.from_numpy(token_ids.astype(np.int64))
    policy(ids, positions, torch.ones(len(ids)), layout).logprobs.mean().backward()
    policy.zero_grad(set_to_none=True)
