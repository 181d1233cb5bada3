"""What sampling gives back: completions, turns, rollouts. Token ids are kept exactly as sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, under the distribution that was sampled."""

    policy_versions: list[tuple[int, int]]
    """Runs of (policy version, number of tokens)."""

    finish_reason: str
    """`stop` (end of turn or stop token), `length` (max tokens) or `abort` (cut short by the client)."""


@dataclass(frozen=True, slots=True)
class Example:
    """One task of an environment: chat messages to answer, and whatever the reward needs."""

    example_id: str
    messages: Sequence[Mapping[str, Any]]
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    prompt_ids: Sequence[int]
    completion: Completion
    text: str
    role_spans: Sequence[tuple[str, int, int]] = ()
    """(role, start, stop) of each block of prompt and completion, in tokens."""

    trainable: bool = True
    """Whether the completion may train; if not, its tokens are `untrainable` in the ledger."""


@dataclass(slots=True)
class Rollout:
    """One attempt at an example. `reward` is None until scored; `error` is the reason where it failed."""

    rollout_id: str
    group_id: str
    example: Example
    env_name: str
    temperature: float
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """`Type: message` of the failure."""

    error_type: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    """What is saved with the rollout besides, as JSON by name: see `orchestrator.env.state_columns`."""

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def stop_reason(self) -> str:
        return self.turns[-1].completion.finish_reason if self.turns else ""

    @property
    def oldest_version(self) -> int | None:
        versions = [version for turn in self.turns for version, _ in turn.completion.policy_versions]
        return min(versions, default=None)
