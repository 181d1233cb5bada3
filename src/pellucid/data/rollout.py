"""Results of sampling: completions, turns, rollouts. Token ids are kept exactly as sampled."""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from pellucid.data.images import ImagePrompt, starts_with
from pellucid.data.packed import PackedArray
from pellucid.data.plain import clip_middle, encodable, to_json
from pellucid.data.schema import COLUMNS, TrainingMode
from pellucid.errors import DataError

RoleSpan = tuple[str, int, int]
"""(role, start, stop) of a block, in tokens."""

NOT_OURS = -1
"""Policy version of tokens that a teacher sampled, not the policy."""

_MAX_REASON = 100  # characters of a finish reason
_NO_COLUMNS: Mapping[str, NDArray[Any]] = {}
_LONG_TEXT = 4096  # characters; below that, a turn's text is not worth compressing


class Completion(msgspec.Struct, frozen=True):
    """The tokens that the engine sampled for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of the sampled tokens, under the distribution that they were drawn from."""

    policy_versions: list[tuple[int, int]]
    """Runs of (policy version, number of tokens)."""

    finish_reason: str
    """`stop` (end of turn or stop token), `length` (max tokens) or `abort` (cut short by the client)."""

    routed_experts: PackedArray | None = None
    """[tokens, layers, top_k] for the prompt and the completion without its last token, which was sampled and
    never computed; None if the server does not record them."""

    link: str = ""
    """Pair `SERVER:ORCHESTRATOR` of processes, by which the ledger books lost tokens; see `ledger.Links`."""

    columns: dict[str, list[float]] = {}
    """Further columns of the schema that the engine fills, by name: a number per sampled token."""

    expert_weights: PackedArray | None = None
    """Weights of `routed_experts`, in their order, as float32; None if the server does not record them."""


@dataclass(frozen=True, slots=True)
class Example:
    """One task of an environment: chat messages to answer, and data that the reward needs."""

    example_id: str
    messages: Sequence[Mapping[str, Any]]
    info: Mapping[str, Any] = field(default_factory=dict)


class RecordedExperts(NamedTuple):
    """Experts of a turn's tokens, or their weights, from `start` on; those of earlier tokens are in the
    record `before`."""

    packed: PackedArray
    """[tokens, layers, top_k]."""

    start: int = 0
    before: "RecordedExperts | None" = None

    @classmethod
    def of(
        cls, recorded: PackedArray | None, before: "RecordedExperts | None" = None
    ) -> "RecordedExperts | None":
        """Makes a record from a server's, which covers all tokens; tokens in `before` are not kept twice."""
        if recorded is None or before is None:
            return None if recorded is None else cls(recorded)
        return cls(PackedArray.pack(recorded.array()[before.stop :]), before.stop, before)

    @property
    def stop(self) -> int:
        return self.start + len(self.packed)

    def rows(self, first: int) -> list[NDArray[Any]]:
        """Returns the experts of the tokens from `first` on, in pieces."""
        pieces = [self.packed.array()[max(first - self.start, 0) :]]
        record = self
        while first < record.start and record.before is not None:
            known, record = record.start, record.before
            pieces.append(record.packed.array()[max(first - record.start, 0) : known - record.start])
        return pieces[::-1]


def join_experts(turns: Sequence[RecordedExperts | None]) -> NDArray[Any] | None:
    """Joins the experts of a sequence's turns, [tokens, layers, top_k]; None if a turn has no record. Their
    weights are joined likewise.

        turn 0    a b X Y               prompt a b, completion X Y     recorded: a b X
        turn 1    a b X Y c Z W         prompt a b X Y c               recorded: a b X Y c Z
        sample    a b X Y c Z W
        experts   0 0 0 1 1 1 1         whose record each token's experts are from

    A token has the experts of the turn that computed it first: those gave the logprobs of the tokens sampled
    in that turn. The last token of a turn was sampled and never computed, so its experts are in the following
    turn. The last token of all has none. It repeats those of the token before it, which changes nothing: it
    predicts no token, and no other token attends to it.
    """
    parts: list[NDArray[Any]] = []
    num_known = 0
    for recorded in turns:
        if recorded is None:
            return None
        parts += recorded.rows(num_known)
        num_known = max(num_known, recorded.stop)
    return np.concatenate([*parts, parts[-1][-1:]])


class _Growing:
    """An array that grows at its end, by a sixteenth at least, so that appending is O(1) on average."""

    __slots__ = ("_buffer", "size")

    def __init__(self, dtype: DTypeLike) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        size = self.size + len(values)
        dtype = np.result_type(self._buffer, values)
        if size > len(self._buffer) or dtype != self._buffer.dtype:
            # Views of the old buffer stay valid: their values never change.
            grown = np.empty(size if not self.size else size + size // 16, dtype)
            grown[: self.size] = self._buffer[: self.size]
            self._buffer = grown
        self._buffer[self.size : size] = values
        self.size = size

    def view(self, start: int, stop: int) -> NDArray[Any]:
        part = self._buffer[start:stop]
        part.flags.writeable = False
        return part


class TokenLine:
    """Token ids of a conversation, and logprobs of its sampled tokens; its turns share them.

        line of tokens    a b X Y c Z              blocks    user assistant tool
        turn 0            a b|X Y                            0:2  2:…
        turn 1            a b X Y c|Z                        0:2  2:4  4:5  5:…

    A turn that continues the end of a line extends it. A turn that continues from an earlier token, because
    another turn has extended the line already, starts a new line with a copy. So the lines of a rollout hold
    about as many tokens as its samples will.
    """

    __slots__ = ("ids", "logprobs")

    def __init__(self) -> None:
        self.ids = _Growing(np.uint32)
        self.logprobs = _Growing(np.float32)

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self.ids.extend(_as_ids(token_ids))
        if logprobs:
            self.logprobs.extend(np.array(logprobs, np.float32))


class BlockLine:
    """Blocks of a conversation before its last reply; the reply is left out because it may still grow.

    Not a list of tuples: with 200 turns, those would take a third of a rollout's memory.
    """

    __slots__ = ("bounds", "roles")

    def __init__(self) -> None:
        self.roles: list[str] = []
        self.bounds = array("q")

    def extend(self, spans: Sequence[RoleSpan]) -> None:
        for role, start, stop in spans:
            self.roles.append(role)
            self.bounds.extend((start, stop))

    def spans(self, num_blocks: int) -> list[RoleSpan]:
        bounds = iter(self.bounds[: 2 * num_blocks])
        return list(zip(self.roles[:num_blocks], bounds, bounds, strict=True))


def _as_ids(values: Sequence[int]) -> NDArray[np.integer[Any]]:
    """Converts to uint32; keeps ids that do not fit, so that the sample is rejected and still counted."""
    try:
        return np.array(values, np.uint32)
    except OverflowError:
        return np.array(values, np.int64)


class TurnTrace(msgspec.Struct, array_like=True):
    """A turn's place in its conversation and in time.

    The conversation of a turn is the first `keeps` messages of the conversation of turn `after`, then the
    messages that it adds, then its reply:

        turn 0   system user            reply     after = -1, adds nothing to the example's messages
        turn 1   system user reply tool reply     after = 0, adds the tool's message
        turn 2   system user summary    reply     after = 1, keeps = 2: history was rewritten
    """

    after: int = -1
    """Number of the turn whose conversation this one starts with; -1: the messages of the example."""

    keeps: int | None = None
    """Number of messages kept of that conversation; None: all."""

    messages: bytes = b""
    """Added messages as a JSON list, deflated if it is long; empty: none. See `set_messages`."""

    tool_calls: bytes = b""
    """Calls that the environment found in the reply, as a JSON list; empty: none. See `set_tool_calls`."""

    start_s: float = 0.0
    """Seconds from the start of the attempt to the request."""

    wait_s: float = 0.0
    """Seconds from the request to its answer."""

    def set_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        text = to_json(messages) if messages else b""
        self.messages = text if len(text) < _LONG_TEXT else zlib.compress(text, level=1)

    def set_tool_calls(self, calls: object) -> None:
        """Takes calls in OpenAI's form and keeps their `id`, `name`, `arguments`; others stay as they are."""
        kept = [_brief_call(call) for call in calls] if isinstance(calls, (list, tuple)) else []
        self.tool_calls = to_json(kept) if kept else b""

    @property
    def messages_json(self) -> bytes:
        is_json = self.messages[:1] in (b"", b"[")
        return self.messages if is_json else zlib.decompress(self.messages)


def _brief_call(call: object) -> object:
    match call:
        case {"id": key, "function": {"name": name, "arguments": arguments}}:
            return {"id": key, "name": name, "arguments": arguments}
    return call


class TurnTokens(NamedTuple):
    prompt_ids: NDArray[np.integer[Any]]
    token_ids: NDArray[np.integer[Any]]
    """Sampled tokens."""

    logprobs: NDArray[np.float32]
    routed_experts: RecordedExperts | None
    expert_weights: RecordedExperts | None
    """Weights of the routed experts; None without them."""

    columns: Mapping[str, NDArray[Any]]
    """Further columns of the sampled tokens."""


class Turn:
    """One prompt and its completion, stored as arrays.

        turn = Turn([5, 6], Completion([9], [-0.5], [(0, 1)], "stop"), "b")
        turn.tokens.token_ids     array([9], uint32)
        turn.known_ids            array([5, 6, 9], uint32)

    A finished rollout waits for its group, then for its batch. Meanwhile 15,000 sampled tokens take a
    megabyte as lists and 120 kB as arrays, and nothing once their samples are built (`forget_tokens`). A turn
    that continues another one stores only the tokens that it adds, so that 200 turns do not repeat them.
    """

    __slots__ = (
        "_blocks",
        "_columns",
        "_expert_weights",
        "_experts",
        "_first_logprob",
        "_line",
        "_num_blocks",
        "_num_logprobs",
        "_reply_role",
        "_reply_start",
        "_reply_stop",
        "_text",
        "_trace",
        "finish_reason",
        "images",
        "link",
        "num_prompt_tokens",
        "num_tokens",
        "policy_versions",
        "sample",
        "trainable",
    )

    def __init__(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        text: str,
        role_spans: Sequence[RoleSpan] = (),
        trainable: bool = True,
        goes_on_from: "Turn | None" = None,
        trace: TurnTrace | None = None,
    ) -> None:
        """Takes `role_spans` as (role, start, stop) of each block of prompt and completion, in tokens.

        `prompt_ids` starts with all tokens of `goes_on_from`, and `role_spans` with all its blocks but the
        last, which is the reply.
        """
        text = encodable(text)
        self._text = text if len(text) < _LONG_TEXT else zlib.compress(text.encode(), level=1)
        self.num_prompt_tokens = len(prompt_ids)
        self.images = (
            (prompt_ids.mm_tensors, prompt_ids.token_id) if isinstance(prompt_ids, ImagePrompt) else None
        )
        """Tensors of the images of its prompt, and the id of the token that stands for them; None without."""
        self.num_tokens = len(completion.token_ids)
        self.policy_versions = completion.policy_versions
        self.finish_reason = clip_middle(encodable(completion.finish_reason), _MAX_REASON)
        self.link = completion.link
        self.trainable = trainable
        """Whether the completion may train; if not, its tokens are `untrainable` in the ledger."""
        self.trace = TurnTrace() if trace is None else trace
        self.sample: int | None = None
        """Number of the sample that holds its tokens, from `num_prompt_tokens` on; None if it has no tokens,
        or `Rollout.number_samples` was not called."""
        last = goes_on_from if goes_on_from is not None and goes_on_from._is_end_of_line else None
        self._line: TokenLine | None = TokenLine() if last is None or last._line is None else last._line
        self._line.extend(prompt_ids[self._line.ids.size :])
        self._first_logprob, self._num_logprobs = self._line.logprobs.size, len(completion.logprobs)
        self._line.extend(completion.token_ids, completion.logprobs)
        self._blocks: BlockLine = BlockLine() if last is None else last._blocks
        # Not as a tuple, for the same reason as the blocks.
        self._reply_role: str | None = role_spans[-1][0] if role_spans else None
        self._reply_start, reply_stop = role_spans[-1][1:] if role_spans else (0, 0)
        self._reply_stop = None if reply_stop == self.num_known else reply_stop
        self._blocks.extend(role_spans[len(self._blocks.roles) : -1])
        self._num_blocks = len(self._blocks.roles)
        self._experts: RecordedExperts | None = _added_experts(
            completion.routed_experts, None if last is None else last._experts
        )
        self._expert_weights: RecordedExperts | None = _added_experts(
            completion.expert_weights, None if last is None else last._expert_weights
        )
        self._columns: Mapping[str, NDArray[Any]] = (
            {name: np.array(values) for name, values in completion.columns.items()}
            if completion.columns
            else _NO_COLUMNS
        )

    @classmethod
    def without_tokens(
        cls,
        *,
        text: str,
        num_prompt_tokens: int,
        num_tokens: int,
        policy_versions: list[tuple[int, int]],
        finish_reason: str,
        link: str = "",
        role_spans: Sequence[RoleSpan] = (),
        trainable: bool = True,
        trace: TurnTrace | None = None,
        sample: int | None = None,
    ) -> "Turn":
        """Makes a turn as `forget_tokens` leaves it: with counts and text, without tokens."""
        completion = Completion([], [], policy_versions, finish_reason, link=link)
        turn = cls([], completion, text, role_spans, trainable, trace=trace)
        turn.sample = sample
        turn.num_prompt_tokens = num_prompt_tokens
        turn.num_tokens = num_tokens
        turn.forget_tokens()
        return turn

    @property
    def text(self) -> str:
        return self._text if isinstance(self._text, str) else zlib.decompress(self._text).decode()

    @property
    def trace(self) -> TurnTrace:
        """Its place in the conversation and in time; a copy, which may be changed and set."""
        return msgspec.msgpack.decode(self._trace, type=TurnTrace)

    @trace.setter
    def trace(self, trace: TurnTrace) -> None:
        # Encoded: as an object, it would take as much memory as thirty tokens.
        self._trace = msgspec.msgpack.encode(trace)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and completion."""
        return self.num_prompt_tokens + self.num_tokens

    @property
    def tokens(self) -> TurnTokens:
        """Views of the stored tokens; raises DataError after `forget_tokens`."""
        line = self._kept_line
        return TurnTokens(
            line.ids.view(0, self.num_prompt_tokens),
            line.ids.view(self.num_prompt_tokens, self.num_known),
            line.logprobs.view(self._first_logprob, self._first_logprob + self._num_logprobs),
            self._experts,
            self._expert_weights,
            self._columns,
        )

    @property
    def known_ids(self) -> NDArray[np.integer[Any]]:
        """Token ids of prompt and completion; a view."""
        return self._kept_line.ids.view(0, self.num_known)

    @property
    def role_spans(self) -> list[RoleSpan]:
        if self._reply_role is None:
            return []
        reply_stop = self.num_known if self._reply_stop is None else self._reply_stop
        reply = (self._reply_role, self._reply_start, reply_stop)
        return [*self._blocks.spans(self._num_blocks), reply]

    def extends(self, last: "Turn") -> bool:
        """Returns whether the prompt starts with all tokens of `last`, and with all its images."""
        if last.num_known > self.num_prompt_tokens:
            return False
        if self._line is last._line:
            return True
        own, known = self._kept_line.ids.view(0, last.num_known), last.known_ids
        if not (own[-1:] == known[-1:] and np.array_equal(own, known)):  # the end first: it differs most
            return False
        return last.images is None or (
            self.images is not None and starts_with(self.images[0], last.images[0])
        )

    def forget_tokens(self) -> None:
        """Frees the tokens; counts and text stay."""
        self._line = self._experts = self._expert_weights = self.images = None
        self._columns = _NO_COLUMNS

    @property
    def _kept_line(self) -> TokenLine:
        if self._line is None:
            raise DataError("the tokens of this turn are in the samples of its rollout, and nowhere else")
        return self._line

    @property
    def _is_end_of_line(self) -> bool:
        has_gone_on = self._line is None or self._line.ids.size > self.num_known
        return not has_gone_on and len(self._blocks.roles) == self._num_blocks


def _added_experts(recorded: PackedArray | None, last: RecordedExperts | None) -> RecordedExperts | None:
    """Returns what a turn adds to the record of the turn before it, of experts or of their weights; keeps a
    damaged record, so that the sample is rejected."""
    try:
        return RecordedExperts.of(recorded, last)
    except (DataError, IndexError):
        return RecordedExperts.of(recorded)


def join_columns(turns: Sequence[Turn]) -> dict[str, NDArray[Any]]:
    """Joins the further columns of a sequence's turns; a turn that lacks one has its fill."""
    names = dict.fromkeys(name for turn in turns for name in turn._columns)
    if unknown := sorted(names.keys() - COLUMNS.keys()):
        raise DataError(f"an engine has sent columns {unknown}, which the schema does not declare")
    return {
        name: np.concatenate(
            [turn.tokens.columns.get(name, COLUMNS[name].filled(turn.num_tokens)) for turn in turns]
        )
        for name in names
    }


@dataclass(slots=True)
class Rollout:
    """One attempt at an example. `reward` is None until it is scored; `error` is set if it failed."""

    rollout_id: str
    group_id: str
    example: Example
    env_name: str
    temperature: float
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the metrics that are parts of the reward, by name."""

    time_s: float = 0.0
    """Seconds from the start of the attempt to its score or failure."""

    error: str | None = None
    """`Type: message (file:line)` of the failure; the line is one of the environment's code."""

    error_type: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    """Further values to save with the rollout, as JSON by name: see `orchestrator.env.state_columns`."""

    training_mode: TrainingMode = TrainingMode.RL
    teacher_logprobs: list[PackedArray] = field(default_factory=list)
    """Teacher logprobs of each sample of this rollout: a float32 per token, NaN for the first."""

    traceback: str = ""
    """Python's traceback of a failure in the environment's code, for the log; it is not saved."""

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_tool_tokens(self) -> int:
        """Tokens of tools' responses in the last turn."""
        spans = self.turns[-1].role_spans if self.turns else ()
        return sum(stop - start for role, start, stop in spans if role == "tool")

    @property
    def stop_reason(self) -> str:
        return self.turns[-1].finish_reason if self.turns else ""

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version of its tokens; None if the policy sampled none."""
        versions = (version for turn in self.turns for version, _ in turn.policy_versions)
        return min((version for version in versions if version != NOT_OURS), default=None)

    def branches(self) -> list[list[Turn]]:
        """Returns the turns of each sample; a turn joins the sample with all of whose tokens it starts."""
        branches: list[list[Turn]] = []
        for turn in (turn for turn in self.turns if turn.num_tokens):
            branch = next((branch for branch in reversed(branches) if turn.extends(branch[-1])), None)
            if branch is None:
                branches.append(branch := [])
            branch.append(turn)
        return branches

    def number_samples(self) -> None:
        """Notes the sample of each turn, which cannot be found any more once the tokens are forgotten."""
        for number, turns in enumerate(self.branches()):
            for turn in turns:
                turn.sample = number

    def forget_tokens(self) -> None:
        """Frees the tokens, which are in the samples by now; ids, counts and texts stay."""
        for turn in self.turns:
            turn.forget_tokens()
        self.teacher_logprobs = []
