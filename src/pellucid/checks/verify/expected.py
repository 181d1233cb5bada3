"""The oracle's account of a scenario: every rollout as it should be, and every sequence of every step.

It starts from what the client sampled, from the settings, and from which rollouts are in which batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pellucid.checks.oracle import (
    Conversation,
    ReferenceSequence,
    Sampled,
    advantages_of,
    expected_samples,
    truncated,
)
from pellucid.checks.verify.scenario import Played, fragile_reward_of, reward_of
from pellucid.checks.verify.script import BROKEN
from pellucid.config import CustomAdvantageConfig
from pellucid.data import TokenTable


@dataclass(frozen=True)
class ExpectedRollout:
    """One rollout as it should be, from what the client sampled for it."""

    env_name: str
    turns: list[Sampled]
    reward: float
    samples: list[Conversation]


class ExpectedRun:
    """Rollouts by their id, and the sequences of each step."""

    def __init__(self, played: Played, tokenizer: Any) -> None:
        self.played = played
        self.config = played.config
        self.tables = [batch.table for batch in played.batches]
        self.tokenizer = tokenizer
        turns: dict[str, list[Sampled]] = {}
        names: dict[str, str] = {}
        for request in played.requests:
            known = turns.setdefault(request.rollout_id, [])
            is_withdrawn = request.env_name == "tools" and len(known) == 2
            known.append(replace(request.sampled, is_trainable=not is_withdrawn))
            names[request.rollout_id] = request.env_name
        self.rollouts = {
            rollout_id: ExpectedRollout(
                names[rollout_id], known, self._reward(names[rollout_id], known), expected_samples(known)
            )
            for rollout_id, known in turns.items()
        }
        self.failed = {
            rollout_id
            for rollout_id, rollout in self.rollouts.items()
            if rollout.env_name == "fragile" and BROKEN in self._texts(rollout.turns)[0]
        }
        self.temperature = played.config.orchestrator.sampling.temperature

    @cached_property
    def seq_len(self) -> int:
        """Shorter than the longest sample that trains by two tokens: its last reply is cut within."""
        return max(int(table.lengths[table.trainable_lengths > 0].max()) for table in self.tables) - 2

    def _reward(self, env_name: str, turns: Sequence[Sampled]) -> float:
        text = "".join(self._texts(turns)[:2])
        match env_name:
            case "flat":
                return 0.1
            case "fragile":
                return fragile_reward_of(text)
            case _:
                return reward_of(text)

    def _texts(self, turns: Sequence[Sampled]) -> list[str]:
        return [self.tokenizer.decode(turn.reply_ids, skip_special_tokens=True) for turn in turns]

    @property
    def knows_advantages(self) -> bool:
        """Whether the run's advantage function is one that the oracle has, too."""
        return not isinstance(self.config.orchestrator.advantage, CustomAdvantageConfig)

    def advantage(self, rollout_id: str) -> float:
        """The advantage of a rollout among its group, or the recorded one where a custom function made it."""
        if not self.knows_advantages:
            return float(self._recorded_advantages[rollout_id])
        members = self.members(group_of(rollout_id))
        rollouts = [self.rollouts[member] for member in members]
        settings = self.config.orchestrator.advantage.model_dump()
        advantages = advantages_of(
            settings["type"],
            [each.reward for each in rollouts],
            completion_tokens=[sum(len(turn.reply_ids) for turn in each.turns) for each in rollouts],
            tool_tokens=[0 for _ in rollouts],
            num_turns=[len(each.turns) for each in rollouts],
            length_penalty=settings.get("length_penalty"),
        )
        return advantages[members.index(rollout_id)]

    @cached_property
    def _recorded_advantages(self) -> dict[str, float]:
        return {
            rollout_id: advantage
            for table in self.tables
            for rollout_id, advantage in zip(
                table["rollout_id"].tolist(), table["advantage"].tolist(), strict=True
            )
        }

    def members(self, group: str) -> list[str]:
        """The rollouts of a group that an advantage compares: those that did not fail."""
        return [
            rollout_id
            for rollout_id in self.rollouts
            if group_of(rollout_id) == group and rollout_id not in self.failed
        ]

    def sequences(self, step: int, seq_len: int) -> dict[tuple[str, int], ReferenceSequence]:
        """The sequences of a step, by rollout and number of the sample."""
        found = {}
        for rollout_id in rollouts_of(self.tables[step]):
            for number, whole in enumerate(self.rollouts[rollout_id].samples):
                sample = truncated(whole, seq_len)
                is_sampled = np.array(sample.is_sampled)
                found[rollout_id, number] = ReferenceSequence(
                    sample.token_ids,
                    np.array(sample.is_trainable),
                    np.array(sample.logprobs),
                    np.where(is_sampled, float(np.float32(self.advantage(rollout_id))), 0.0),
                    np.full(len(is_sampled), float(np.float32(self.temperature))),
                    group=group_of(rollout_id),
                )
        return found


def rollouts_of(table: TokenTable) -> dict[str, list[int]]:
    """Rows of each rollout of a batch, in its order."""
    found: dict[str, list[int]] = {}
    for row, rollout_id in enumerate(table["rollout_id"].tolist()):
        found.setdefault(rollout_id, []).append(row)
    return found


def group_of(rollout_id: str) -> str:
    """`g4.1-r2` -> `g4.1`."""
    return rollout_id.rpartition("-")[0]
