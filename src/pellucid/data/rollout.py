"""What sampling gives back: completions, turns, rollouts. Token ids are kept exactly as sampled."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.data.columns import TrainingMode
from pellucid.data.packed import PackedArray
from pellucid.errors import DataError

NOT_OURS = -1
"""The policy version of tokens that no version of the policy sampled: a teacher's."""

_LONG_TEXT = 4096  # characters; below that, a turn's text is not worth compressing


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, under the distribution that was sampled."""

    policy_versions: list[tuple[int, int]]
    """Runs of (policy version, number of tokens)."""

    finish_reason: str
    """`stop` (end of turn or stop token), `length` (max tokens) or `abort` (cut short by the client)."""

    routed_experts: PackedArray | None = None
    """[tokens, layers, top_k], where the server records them: of the prompt and the completion without its
    last token, which was sampled and never computed."""


@dataclass(frozen=True, slots=True)
class Example:
    """One task of an environment: chat messages to answer, and whatever the reward needs."""

    example_id: str
    messages: Sequence[Mapping[str, Any]]
    info: Mapping[str, Any] = field(default_factory=dict)


class TurnTokens(NamedTuple):
    prompt_ids: NDArray[np.integer[Any]]
    token_ids: NDArray[np.integer[Any]]
    """What was sampled."""

    logprobs: NDArray[np.float32]
    routed_experts: PackedArray | None
    """See `Completion`."""


class Turn:
    """One prompt and what was sampled for it, byte-backed: lists are made for whoever asks.

        turn = Turn([5, 6], Completion([9], [-0.5], [(0, 1)], "stop"), "b")
        turn.tokens.token_ids     array([9], uint32)        as it is kept
        turn.completion           Completion([9], …)        made anew each time

    A finished rollout waits for its group, then for its batch. As lists, 15,000 sampled tokens take a
    megabyte meanwhile; as arrays, 120 kB; and none once their samples are built (`forget_tokens`).
    """

    __slots__ = (
        "_text",
        "_tokens",
        "finish_reason",
        "num_prompt_tokens",
        "num_tokens",
        "policy_versions",
        "role_spans",
        "trainable",
    )

    def __init__(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        text: str,
        role_spans: Sequence[tuple[str, int, int]] = (),
        trainable: bool = True,
    ) -> None:
        """`role_spans`: (role, start, stop) of each block of prompt and completion, in tokens."""
        self._tokens: TurnTokens | None = TurnTokens(
            _as_ids(prompt_ids),
            _as_ids(completion.token_ids),
            np.array(completion.logprobs, np.float32),
            completion.routed_experts,
        )
        self._text = text if len(text) < _LONG_TEXT else zlib.compress(text.encode(), level=1)
        self.num_prompt_tokens = len(prompt_ids)
        self.num_tokens = len(completion.token_ids)
        self.policy_versions = completion.policy_versions
        self.finish_reason = completion.finish_reason
        self.role_spans = role_spans
        self.trainable = trainable
        """Whether the completion may train; if not, its tokens are `untrainable` in the ledger."""

    @classmethod
    def without_tokens(
        cls,
        *,
        text: str,
        num_prompt_tokens: int,
        num_tokens: int,
        policy_versions: list[tuple[int, int]],
        finish_reason: str,
        role_spans: Sequence[tuple[str, int, int]] = (),
    ) -> "Turn":
        """What `forget_tokens` leaves of a turn."""
        turn = cls([], Completion([], [], policy_versions, finish_reason), text, role_spans)
        turn.num_prompt_tokens = num_prompt_tokens
        turn.num_tokens = num_tokens
        turn.forget_tokens()
        return turn

    @property
    def text(self) -> str:
        return self._text if isinstance(self._text, str) else zlib.decompress(self._text).decode()

    @property
    def tokens(self) -> TurnTokens:
        if self._tokens is None:
            raise DataError("the tokens of this turn are in the samples of its rollout, and nowhere else")
        return self._tokens

    @property
    def prompt_ids(self) -> list[int]:
        prompt_ids: list[int] = self.tokens.prompt_ids.tolist()
        return prompt_ids

    @property
    def completion(self) -> Completion:
        _, token_ids, logprobs, experts = self.tokens
        return Completion(
            token_ids.tolist(), logprobs.tolist(), self.policy_versions, self.finish_reason, experts
        )

    def forget_tokens(self) -> None:
        """What is counted, and the text, stay."""
        self._tokens = None


def _as_ids(values: Sequence[int]) -> NDArray[np.integer[Any]]:
    """What does not fit is kept as it is, to be rejected as a sample with its tokens in the books."""
    try:
        return np.array(values, np.uint32)
    except OverflowError:
        return np.array(values, np.int64)


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
    """`Type: message (file:line)` of the failure; the line is one of the environment's code."""

    error_type: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    """What is saved with the rollout besides, as JSON by name: see `orchestrator.env.state_columns`."""

    training_mode: TrainingMode = TrainingMode.RL
    teacher_logprobs: list[bytes] = field(default_factory=list)
    """What a teacher says of each sample that it will give: a float32 per token, NaN for the first."""

    traceback: str = ""
    """Python's traceback of a failure in the environment's code, for the log; it is not saved."""

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_tool_tokens(self) -> int:
        """Tokens of tools' responses that the last turn saw."""
        spans = self.turns[-1].role_spans if self.turns else ()
        return sum(stop - start for role, start, stop in spans if role == "tool")

    @property
    def stop_reason(self) -> str:
        return self.turns[-1].finish_reason if self.turns else ""

    @property
    def oldest_version(self) -> int | None:
        """None if it has no token of the policy's."""
        versions = (version for turn in self.turns for version, _ in turn.policy_versions)
        return min((version for version in versions if version != NOT_OURS), default=None)

    def forget_tokens(self) -> None:
        """They are in its samples; ids, counts and texts stay."""
        for turn in self.turns:
            turn.forget_tokens()
        self.teacher_logprobs = []
