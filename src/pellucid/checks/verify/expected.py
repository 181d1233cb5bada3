"""The oracle's account of a scenario: every rollout as it should be, and every sequence of every step.

It starts from what the client sampled, from the settings, and from which rollouts are in which batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pellucid.checks.oracle.conversation import (
    Conversation,
    FinishedGroup,
    Sampled,
    advantages_of,
    expected_samples,
    response_length_of,
    truncated,
)
from pellucid.checks.oracle.training import ReferenceSequence
from pellucid.checks.verify.scenario import (
    GROUP_SIZE,
    NUM_STEPS,
    SECOND_RESPONSE,
    TOOL_RESPONSE,
    Played,
    Tools,
    after,
    fragile_reward_of,
)
from pellucid.checks.verify.script import BROKEN, reward_of
from pellucid.config import CustomAdvantageConfig
from pellucid.data import TokenTable, TrainingMode

NUM_TURNS = {"tools": 4}
"""Requests of a rollout, where it is not one."""


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
            if rollout.env_name == "fragile" and BROKEN in self.texts(rollout.turns)[0]
        }
        self.temperature = played.config.orchestrator.sampling.temperature

    @cached_property
    def seq_len(self) -> int:
        """Shorter than the longest sample that trains by two tokens: its last reply is cut within."""
        return max(int(table.lengths[table.trainable_lengths > 0].max()) for table in self.tables) - 2

    def _reward(self, env_name: str, turns: Sequence[Sampled]) -> float:
        text = "".join(self.texts(turns)[:2])
        match env_name:
            case "flat":
                return 0.1
            case "fragile":
                return fragile_reward_of(text)
            case _:
                return reward_of(text)

    def texts(self, turns: Sequence[Sampled]) -> list[str]:
        return [self.tokenizer.decode(turn.reply_ids, skip_special_tokens=True) for turn in turns]

    @property
    def knows_advantages(self) -> bool:
        """Whether the run's advantage function is one that the oracle has, too."""
        return not isinstance(self.config.orchestrator.advantage, CustomAdvantageConfig)

    def advantage(self, rollout_id: str) -> float:
        """The advantage of a rollout among its group, or the recorded one where a custom function made it."""
        if not self.knows_advantages:
            return float(self._recorded_advantages.get(rollout_id, 0.0))
        members = self.members(group_of(rollout_id))
        rollouts = [self.rollouts[member] for member in members]
        settings = self.config.orchestrator.advantage.model_dump()
        advantages = advantages_of(
            settings["type"],
            [each.reward for each in rollouts],
            completion_tokens=[sum(len(turn.reply_ids) for turn in each.turns) for each in rollouts],
            tool_tokens=[self.num_tool_tokens(member) for member in members],
            num_turns=[len(each.turns) for each in rollouts],
            length_penalty=settings.get("length_penalty"),
        )
        return advantages[members.index(rollout_id)]

    def num_tool_tokens(self, rollout_id: str) -> int:
        """Tokens of the tools' responses that the last turn of a whole rollout saw."""
        return self._num_tool_tokens if self.rollouts[rollout_id].env_name == "tools" else 0

    @cached_property
    def _num_tool_tokens(self) -> int:
        messages = Tools(seed=0).example(0).messages
        called = after(messages, "reply", TOOL_RESPONSE)
        return response_length_of(self.tokenizer, messages, TOOL_RESPONSE) + response_length_of(
            self.tokenizer, called, SECOND_RESPONSE
        )

    @cached_property
    def _recorded_advantages(self) -> dict[str, float]:
        return {
            each["rollout_id"]: each["advantage"]
            for each in self.played.settled
            if each["advantage"] is not None
        }

    def finished_groups(self) -> list[FinishedGroup]:
        """Groups of which every request was answered, in the order of their last ones."""
        missing: dict[str, int] = {}
        finished = []
        for request in self.played.requests:
            group = group_of(request.rollout_id)
            num_turns = NUM_TURNS.get(request.env_name, 1)
            missing[group] = missing.get(group, GROUP_SIZE * num_turns) - 1
            if not missing[group]:
                finished.append(FinishedGroup(group, len(self.trained_members(group)), self.oldest(group)))
        return finished

    def oldest(self, group: str) -> int:
        """The oldest policy version among the tokens of a group that could train; of none, the newest one."""
        versions = [
            version
            for member in self.members(group)
            for turn in self.rollouts[member].turns
            for version in turn.versions
        ]
        return min(versions, default=NUM_STEPS)

    def trained_members(self, group: str) -> list[str]:
        """The rollouts of a group that have a signal."""
        keeps_all = not self.config.orchestrator.drops_zero_advantages
        return [member for member in self.members(group) if keeps_all or self.advantage(member) != 0]

    def members(self, group: str) -> list[str]:
        """The rollouts of a group that an advantage compares: those that did not fail."""
        return [
            rollout_id
            for rollout_id in self.rollouts
            if group_of(rollout_id) == group and rollout_id not in self.failed
        ]

    def table(self, step: int) -> TokenTable:
        """The batch of a step; after those of the orchestrator comes one to distil from."""
        return self.tables[step] if step < NUM_STEPS else self._distilled

    @cached_property
    def _distilled(self) -> TokenTable:
        """The first batch once more, its samples opd and sft in turn, with a teacher's logprobs."""
        table = self.tables[0]
        said = np.random.default_rng(0).uniform(-4.0, -0.1, table.num_tokens).astype(np.float32)
        said[~table["sampled"]] = np.nan
        modes = [TrainingMode.SFT if row % 2 else TrainingMode.OPD for row in range(table.num_sequences)]
        columns = {
            **{name: table[name] for name in table.columns},
            "training_mode": np.array([mode.value for mode in modes], object),
            "teacher_logprobs": said,
        }
        return TokenTable(table.lengths, columns)

    def conversations(self, step: int, seq_len: int) -> dict[tuple[str, int], Conversation]:
        """The samples of a step, by rollout and number of the sample, truncated."""
        return {
            (rollout_id, number): truncated(whole, seq_len)
            for rollout_id in rollouts_of(self.table(step))
            for number, whole in enumerate(self.rollouts[rollout_id].samples)
        }

    def sequences(self, step: int, seq_len: int) -> dict[tuple[str, int], ReferenceSequence]:
        """The same as they train."""
        found = {}
        rows = rollouts_of(self.table(step))
        for (rollout_id, number), sample in self.conversations(step, seq_len).items():
            is_sampled = np.array(sample.is_sampled)
            sequence = ReferenceSequence(
                sample.token_ids,
                np.array(sample.is_trainable),
                np.array(sample.logprobs),
                np.where(is_sampled, float(np.float32(self.advantage(rollout_id))), 0.0),
                np.full(len(is_sampled), float(np.float32(self.temperature))),
                group=group_of(rollout_id),
            )
            if step == NUM_STEPS and number < len(rows[rollout_id]):
                sequence = self._taught(sequence, rows[rollout_id][number])
            found[rollout_id, number] = sequence
        return found

    def _taught(self, sequence: ReferenceSequence, row: int) -> ReferenceSequence:
        table = self._distilled
        start = int(table.token_offsets[row])
        teacher = table["teacher_logprobs"][start : start + len(sequence.token_ids)].astype(np.float64)
        return replace(sequence, mode=table["training_mode"][row], teacher=teacher)


def rollouts_of(table: TokenTable) -> dict[str, list[int]]:
    """Rows of each rollout of a batch, in its order."""
    found: dict[str, list[int]] = {}
    for row, rollout_id in enumerate(table["rollout_id"].tolist()):
        found.setdefault(rollout_id, []).append(row)
    return found


def group_of(rollout_id: str) -> str:
    """`g4.1-r2` -> `g4.1`."""
    return rollout_id.rpartition("-")[0]
