"""A rollout's conversation with the model: messages in, text out, every sampled token recorded.

- A turn is recorded before its text is returned, so what was sampled is known whatever happens next.
- A request outlives the caller that is cancelled while it waits: it is cut short, and what the server has
  sampled until then is received and recorded before the cancellation goes on. `close` does the same for
  every request that is still running, so no turn comes after its rollout is settled.
- Sampled ids are kept as sampled. A prompt that goes on from an earlier reply starts with the very tokens
  of that prompt and completion; one that does not is a branch, rendered from its beginning.
- What is remembered of a conversation is a copy: a caller that changes its messages changes nothing here.
- A turn stores what it adds to the one it goes on from, so a rollout holds its tokens once.
- The rollouts of a group get the same prompt object, so the engine can share its prefill.
- A seed depends on the run's seed, the rollout and the number of the call alone: not on process, time or
  order.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from pellucid.data import Completion, RoleSpan, Rollout, Turn, TurnTrace
from pellucid.data.images import without_pixels
from pellucid.errors import InferenceError, PromptTooLongError, RolloutError
from pellucid.inference.client import REFUSED, Account, InferenceClient, SamplingParams
from pellucid.orchestrator.chat import (
    ChatTemplate,
    Message,
    Rendered,
    Tools,
    copy_nested,
    take_message,
    take_messages,
)
from pellucid.orchestrator.tasks import finish_despite_cancellation

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # a server that swaps large weights answers nothing meanwhile
_ABORT_AGAIN_S = 0.5
_SEED_BYTES = 4  # engines and numpy take seeds below 2**32


def stable_seed(*parts: object) -> int:
    """Hashes `parts` to a seed that is the same in every process, unlike Python's `hash`."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(name, digest_size=_SEED_BYTES).digest(), "little")


@dataclass(slots=True)
class SamplingEnd:
    """The end of a run's sampling, which all its samplers share."""

    has_come: bool = False
    """Whether the run is over: no session samples another turn then."""

    patience_s: float = _PATIENCE_S
    """Seconds that a request that was cut short may take to answer; after that its tokens are given up."""


@dataclass(slots=True)
class Sampler:
    """Client, chat template and sampling parameters that all sessions of a run share."""

    client: InferenceClient
    chat: ChatTemplate
    run_id: str
    seed: int
    temperature: float
    max_tokens: int
    max_model_len: int
    end: SamplingEnd = field(default_factory=SamplingEnd)
    on_completion: Callable[[Completion, Account], Completion] | None = None
    """Relabels every completion before it is recorded; None: it is the policy's own."""

    asking: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager that is entered while a request is with the client."""


class PromptCache:
    """The first prompt of a group, rendered once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._first: tuple[tuple[list[Message], list[Message]], Rendered] | None = None

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Rendered:
        asked = list(messages), list(tools)
        if self._first is None:
            self._first = (copy_nested(asked[0]), copy_nested(asked[1])), self._chat.prompt(*asked)
        first, rendered = self._first
        return rendered if first == asked else self._chat.prompt(*asked)


def as_message(turn: Turn) -> Message:
    """Returns the message that a reply becomes when the conversation continues."""
    return {"role": "assistant", "content": turn.text}


@dataclass(frozen=True, slots=True)
class _Known:
    """A conversation that ends with a reply, stored as what it adds to the one it continues; the first of all
    is empty."""

    messages: list[Message]
    """Messages that it adds; the last is the reply."""

    num_messages: int
    """Number of messages of the whole conversation."""

    tools: list[Message]
    turn: Turn | None
    place: int
    """Place of the turn in the rollout."""

    number: int
    """Number of conversations that were known before it."""

    later: "list[_Known]" = field(default_factory=list)
    """Conversations that continue this one."""


class _Prompt(NamedTuple):
    token_ids: list[int]
    spans: list[RoleSpan]
    goes_on_from: Turn | None
    """Turn with whose tokens the prompt starts."""

    known: _Known
    added: list[Message]
    """Copy of the messages after those of `known`."""

    tools: list[Message]
    trace: TurnTrace


class Session:
    """One rollout's conversation with the model; an environment calls `respond` or `sample`."""

    def __init__(
        self,
        rollout: Rollout,
        sampler: Sampler,
        prompts: PromptCache,
        on_request: Callable[[str], None] | None = None,
        opening: Sequence[Message] | None = None,
    ) -> None:
        """`on_request` is called with the id of the rollout before each of its requests. `opening` are the
        example's messages as the environment gets them; None: as they are saved."""
        self._on_request = on_request
        self._rollout = rollout
        self._sampler = sampler
        self._prompts = prompts
        self._started = time.monotonic()
        self._opening: Sequence[Message] = rollout.example.messages if opening is None else opening
        with suppress(TypeError, RolloutError):  # not every environment shows the model its example as it is
            self._opening = take_messages(self._opening)
        self._known = _Known([], 0, [], None, -1, 0)
        """The empty conversation, which all others continue."""
        self._sizes: dict[int, int] = {}
        """Number of messages of the conversation of each turn that is known, by its place."""
        self._num_known = 1
        self._running: dict[str, asyncio.Task[Turn]] = {}
        self._num_calls = 0
        self._closed = False

    async def respond(self, messages: Sequence[Message]) -> str:
        """Returns the model's reply to the whole conversation so far."""
        return (await self.sample(messages)).text

    async def sample(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        trainable: bool = True,
        max_tokens: int | None = None,
        as_message: Callable[[Turn], Message] = as_message,
    ) -> Turn:
        """Returns the reply with its tokens; if not `trainable`, they are counted, but never trained on."""
        asked = time.monotonic()
        taken = take_messages(messages)
        if self._closed or self._sampler.end.has_come:
            over = "run" if self._sampler.end.has_come else "rollout"
            raise RolloutError(f"the {over} is over; no further turn is sampled")
        number = self._num_calls
        self._num_calls += 1
        prompt = self._prompt(taken, list(tools))
        prompt.trace.start_s = asked - self._started
        params = self._params(len(prompt.token_ids), number, max_tokens)
        if self._on_request is not None:
            self._on_request(self._rollout.rollout_id)
        request_id = f"{self._sampler.run_id}/{self._rollout.group_id}/{self._rollout.rollout_id}/{number}"
        request = asyncio.create_task(self._sample(prompt, params, request_id, trainable, as_message))
        self._running[request_id] = request
        request.add_done_callback(lambda request: self._forget(request_id, request))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            await finish_despite_cancellation(self._cut_short([request_id]))
            raise

    def withdraw(self, turn: Turn) -> None:
        """Marks the tokens of a turn as not trainable after all."""
        turn.trainable = False

    async def close(self) -> None:
        """Ends sampling: cuts running requests short and records what they sampled."""
        self._closed = True
        if self._running:
            await finish_despite_cancellation(self._cut_short(list(self._running)))

    @property
    def chat(self) -> ChatTemplate:
        """The template that turns messages into tokens."""
        return self._sampler.chat

    @property
    def temperature(self) -> float:
        return self._sampler.temperature

    @property
    def max_tokens(self) -> int:
        return self._sampler.max_tokens

    def _forget(self, request_id: str, request: "asyncio.Task[Turn]") -> None:
        del self._running[request_id]
        if not request.cancelled():
            request.exception()  # seen, even if its caller was cancelled and never asks

    async def _sample(
        self,
        prompt: _Prompt,
        params: SamplingParams,
        request_id: str,
        trainable: bool,
        as_message: Callable[[Turn], Message],
    ) -> Turn:
        account = Account(self._sampler.run_id, self._rollout.env_name)
        with self._sampler.asking():
            completion = await self._sampler.client.generate(prompt.token_ids, params, account, request_id)
        prompt.trace.wait_s = time.monotonic() - self._started - prompt.trace.start_s
        if self._sampler.on_completion is not None:
            completion = self._sampler.on_completion(completion, account)
        turn = self._record(prompt, completion, trainable)
        place = len(self._rollout.turns) - 1
        number = len(completion.token_ids)
        if completion.finish_reason == REFUSED:
            cause = "the server was restarted, or serves other weights than this run gave it"
            raise RolloutError(f"{number} tokens are refused: {cause}")
        if completion.finish_reason == "abort":
            raise RolloutError(f"the server cut the completion short after {number} tokens")
        reply = take_message(as_message(turn), "the reply")
        if calls := reply.get("tool_calls"):
            prompt.trace.set_tool_calls(calls)
            turn.trace = prompt.trace
        self._remember(prompt, reply, turn, place)
        return turn

    def _record(self, prompt: _Prompt, completion: Completion, trainable: bool) -> Turn:
        """Adds the turn to the rollout, even if the tokenizer cannot decode it: its tokens were sampled."""
        unreadable: Exception | None = None
        try:
            text = self._sampler.chat.decode(completion.token_ids)
        except Exception as error:
            text, unreadable = "", error
        reply_start = prompt.spans[-1][2] if prompt.spans else 0
        reply = ("assistant", reply_start, len(prompt.token_ids) + len(completion.token_ids))
        spans = [*prompt.spans, reply]
        turn = Turn(prompt.token_ids, completion, text, spans, trainable, prompt.goes_on_from, prompt.trace)
        self._rollout.turns.append(turn)
        if unreadable is not None:
            raise RolloutError(
                f"the tokenizer cannot decode what was sampled: {type(unreadable).__name__}: {unreadable}"
            ) from unreadable
        return turn

    def _remember(self, prompt: _Prompt, reply: Message, turn: Turn, place: int) -> None:
        messages = [*prompt.added, copy_nested(reply)]
        num_messages = prompt.known.num_messages + len(messages)
        prompt.known.later.append(_Known(messages, num_messages, prompt.tools, turn, place, self._num_known))
        self._sizes[place] = num_messages
        self._num_known += 1

    def _compare(self, messages: list[Message], tools: list[Message]) -> tuple[_Known, TurnTrace]:
        """Returns the conversation that `messages` continue (of several, the longest, then the latest), and
        what they add to the one with which they have most messages in common.

        Of several with as many, that is one which they continue, then the latest whose other messages they
        replace, then the example's.
        """
        num_common = _num_equal(messages, self._opening)
        starts_anew = num_common == len(messages)
        longest, closest = self._known, (num_common, 3 if starts_anew else 1, -1)
        candidates = [(each, True, 0) for each in self._known.later]
        while candidates:
            known, is_continued, num_common = candidates.pop()
            start = known.num_messages - len(known.messages)
            if num_common == start:  # all messages before its own
                num_common = _num_equal(messages, known.messages, start)
            is_whole = num_common == known.num_messages
            is_continued &= is_whole and num_common < len(messages) and tools == known.tools
            if is_continued:
                longest = max(longest, known, key=lambda each: (each.num_messages, each.number))
            closest = max(closest, (num_common, 2 if num_common else 0, known.place))
            if is_whole:
                closest = max(closest, (num_common, 3, known.place))
            candidates += [(later, is_continued, num_common) for later in known.later]
        num_common, _, place = closest
        num_before = len(self._rollout.example.messages) if place < 0 else self._sizes[place]
        trace = TurnTrace(place, None if num_common == num_before else num_common)
        trace.set_messages(without_pixels(messages[num_common:]))
        return longest, trace

    async def _cut_short(self, request_ids: Collection[str]) -> None:
        """Aborts these requests and returns once each has recorded its answer, or has been given up."""
        requests = {key: self._running[key] for key in request_ids if key in self._running}
        loop = asyncio.get_running_loop()
        started = loop.time()
        while running := [key for key, request in requests.items() if not request.done()]:
            if loop.time() - started >= self._sampler.end.patience_s:
                log.warning("no answer from the server to the aborted requests %s", ", ".join(running))
                for key in running:
                    requests[key].cancel()
            else:
                # More than once: a request that is still on its way to the server is passed over.
                with suppress(InferenceError, TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._sampler.client.abort(running)
            await asyncio.wait([requests[key] for key in running], timeout=_ABORT_AGAIN_S)

    def _params(self, num_prompt: int, number: int, max_tokens: int | None) -> SamplingParams:
        sampler = self._sampler
        if num_prompt == 0:
            raise RolloutError("the prompt has no tokens; give the model a message that is not empty")
        room = sampler.max_model_len - num_prompt
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and leaves no room for a completion in "
                f"inference.max_model_len = {sampler.max_model_len}; raise it or shorten the prompt"
            )
        return SamplingParams(
            temperature=sampler.temperature,
            max_tokens=min(max_tokens or sampler.max_tokens, sampler.max_tokens, room),
            seed=stable_seed(sampler.seed, self._rollout.rollout_id, number),
            stop_token_ids=sampler.chat.end_of_turn_ids,
        )

    def _prompt(self, messages: list[Message], tools: list[Message]) -> _Prompt:
        known, trace = self._compare(messages, tools)
        num_known = known.num_messages
        added = copy_nested(messages[num_known:])
        if known.turn is not None:
            rendered = self._sampler.chat.continuation(messages, num_known - 1, tools)
            if rendered is not None:
                self._refuse_sampled_image(known.turn)
                token_ids, spans = self._extend(known.turn, rendered)
                token_ids = self._sampler.chat.with_images(token_ids, messages)
                return _Prompt(token_ids, spans, known.turn, known, added, known.tools, trace)
        rendered = self._prompts.render(messages, tools)
        kept_tools = copy_nested(tools) if known.turn is None else known.tools
        spans = _spans([], rendered.stops, 0)
        return _Prompt(rendered.token_ids, spans, None, known, added, kept_tools, trace)

    def _refuse_sampled_image(self, last: Turn) -> None:
        """Raises RolloutError if the last turn's tokens have the id by which engines find images."""
        token_id = self._sampler.chat.image_token_id
        if token_id is not None and (last.tokens.token_ids == token_id).any():
            marker = self._sampler.chat.tokenizer.convert_ids_to_tokens(token_id)
            raise RolloutError(
                f"the model has sampled {marker} (token {token_id}), the token that stands for images in a "
                "prompt, and no turn can follow; end the rollout there"
            )

    def _extend(self, last: Turn, rendered: Rendered) -> tuple[list[int], list[RoleSpan]]:
        """Appends what the template puts after the last turn to that turn's tokens and spans."""
        token_ids: list[int] = last.known_ids.tolist()
        ends = token_ids[-1] in self._sampler.chat.end_of_turn_ids
        is_repeated = ends and rendered.token_ids[:1] == token_ids[-1:]  # the model closed its turn itself
        offset = len(token_ids) - is_repeated
        (role, reply_stop), *later = rendered.stops
        *spans, (_, reply_start, _) = last.role_spans
        reply = (role, reply_start, max(len(token_ids), offset + reply_stop))
        token_ids += rendered.token_ids[is_repeated:]
        return token_ids, _spans([*spans, reply], later, offset)


def _num_equal(messages: Sequence[Message], others: Sequence[Message], start: int = 0) -> int:
    """Returns `start` plus the number of messages from there on that equal `others`, up to the first that
    differs."""
    stop = min(len(messages), start + len(others))
    return next((at for at in range(start, stop) if messages[at] != others[at - start]), max(start, stop))


def _spans(known: list[RoleSpan], stops: list[tuple[str, int]], offset: int) -> list[RoleSpan]:
    spans = list(known)
    for role, stop in stops:
        spans.append((role, spans[-1][2] if spans else 0, offset + stop))
    return spans
