"""Advantages: all groups at once, as columns, against a torch call per group."""

import random
from collections import defaultdict
from collections.abc import Sequence

import torch

from benchmarks.result import Result, fastest_each_s
from pellucid.config import DefaultAdvantageConfig
from pellucid.orchestrator.advantage import ScoredRollout, load_advantage

NUM_ROLLOUTS, GROUP_SIZE = 100_000, 8


def run() -> list[Result]:
    torch.set_num_threads(1)
    rollouts = make_rollouts(NUM_ROLLOUTS, GROUP_SIZE)
    ours = load_advantage(DefaultAdvantageConfig())
    our_s, their_s = fastest_each_s([lambda: ours.compute(rollouts), lambda: per_group(rollouts)])
    return [
        Result(
            "advantage, groups of 8",
            NUM_ROLLOUTS / our_s,
            NUM_ROLLOUTS / their_s,
            "rollouts/s",
            "torch per group",
        )
    ]


def make_rollouts(num_rollouts: int, group_size: int) -> list[ScoredRollout]:
    """In the order in which a batch has them: group after group."""
    generator = random.Random(0)
    return [
        ScoredRollout(generator.random(), [generator.randrange(5, 500)], 0, "env", str(group), f"g{group}")
        for group in range(num_rollouts // group_size)
        for _ in range(group_size)
    ]


def per_group(rollouts: Sequence[ScoredRollout]) -> list[float]:
    groups: defaultdict[str | None, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(index)
    advantages = [0.0] * len(rollouts)
    for members in groups.values():
        rewards = torch.tensor([rollouts[index].reward for index in members])
        for index, advantage in zip(members, (rewards - rewards.mean()).tolist(), strict=True):
            advantages[index] = advantage
    return advantages
