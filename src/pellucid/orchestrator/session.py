"""A rollout's conversation with the model: messages in, text out, every sampled token recorded.

- A turn is recorded before its text is returned, so what was sampled is known whatever happens next.
- A request outlives the caller that is cancelled while it waits: it is cut short, and what the server has
  sampled until then is received and recorded before the cancellation goes on. `close` does the same for
  every request that is still running, so no turn comes after its rollout is settled.
- Sampled ids are kept as sampled. A prompt that goes on from an earlier reply starts with the very tokens
  of that prompt and completion; one that does not is a branch, rendered from its beginning.
- The rollouts of a group get the same prompt object, so the engine can share its prefill.
- A seed depends on the run's seed, the rollout and the number of the call alone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pellucid.data import Rollout, Turn
from pellucid.errors import InferenceError, PromptTooLongError, RolloutError
from pellucid.inference.client import REFUSED, Account, InferenceClient, SamplingParams
from pellucid.orchestrator.chat import ChatTemplate, Message, Rendered, Tools
from pellucid.orchestrator.seeds import stable_seed
from pellucid.orchestrator.tasks import outlast

log = logging.getLogger(__name__)

RoleSpan = tuple[str, int, int]

_PATIENCE_S = 60.0  # a server that swaps large weights answers nothing meanwhile
_ABORT_AGAIN_S = 0.5


@dataclass(slots=True)
class Sampler:
    """What all sessions of a run share."""

    client: InferenceClient
    chat: ChatTemplate
    run_id: str
    seed: int
    temperature: float
    max_tokens: int
    max_model_len: int
    closed: bool = False
    """The run is over: no session samples another turn."""

    patience_s: float = _PATIENCE_S
    """How long a request that was cut short may take to answer; after that its tokens are given up."""

    def close(self, patience_s: float) -> None:
        self.closed = True
        self.patience_s = patience_s


class PromptCache:
    """The first prompt of a group, rendered once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._first: tuple[tuple[list[Message], list[Message]], Rendered] | None = None

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Rendered:
        asked = list(messages), list(tools)
        if self._first is None:
            self._first = asked, self._chat.prompt(*asked)
        first, rendered = self._first
        return rendered if first == asked else self._chat.prompt(*asked)


def as_message(turn: Turn) -> Message:
    """How a reply stands in the conversation once that goes on."""
    return {"role": "assistant", "content": turn.text}


@dataclass(frozen=True, slots=True)
class _Question:
    messages: list[Message]
    tools: list[Message]
    trainable: bool
    max_tokens: int | None
    as_message: Callable[[Turn], Message]


@dataclass(frozen=True, slots=True)
class _Known:
    """A conversation up to and with a reply, and the turn that sampled the reply."""

    messages: list[Message]
    tools: list[Message]
    turn: Turn

    def precedes(self, question: _Question) -> bool:
        num_known = len(self.messages)
        return (
            num_known < len(question.messages)
            and self.messages == question.messages[:num_known]
            and self.tools == question.tools
        )


class Session:
    """What an environment talks to during one rollout."""

    def __init__(
        self,
        rollout: Rollout,
        sampler: Sampler,
        prompts: PromptCache,
        on_request: Callable[[str], None] | None = None,
    ) -> None:
        """`on_request` is told the id of the rollout before each of its requests."""
        self._on_request = on_request
        self._rollout = rollout
        self._sampler = sampler
        self._prompts = prompts
        self._known: list[_Known] = []
        self._running: dict[str, asyncio.Task[Turn]] = {}
        self._num_calls = 0
        self._closed = False

    async def respond(self, messages: Sequence[Message]) -> str:
        """The model's reply to the whole conversation so far."""
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
        """The reply, with its tokens; what is not `trainable` is accounted for, but never trained on."""
        request_id = self._start(_Question(list(messages), list(tools), trainable, max_tokens, as_message))
        request = self._running[request_id]
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            await outlast(self._cut_short([request_id]))
            raise

    def withdraw(self, turn: Turn) -> None:
        """What was sampled in this turn shall not train after all."""
        turn.trainable = False

    async def close(self) -> None:
        """Nothing is sampled any more, and what was sampled is recorded."""
        self._closed = True
        if self._running:
            await outlast(self._cut_short(list(self._running)))

    @property
    def chat(self) -> ChatTemplate:
        """How messages become tokens."""
        return self._sampler.chat

    @property
    def temperature(self) -> float:
        return self._sampler.temperature

    @property
    def max_tokens(self) -> int:
        return self._sampler.max_tokens

    def _start(self, question: _Question) -> str:
        if self._closed or self._sampler.closed:
            over = "run" if self._sampler.closed else "rollout"
            raise RolloutError(f"the {over} is over; no further turn is sampled")
        number = self._num_calls
        self._num_calls += 1
        prompt_ids, spans = self._prompt(question)
        params = self._params(len(prompt_ids), number, question.max_tokens)
        if self._on_request is not None:
            self._on_request(self._rollout.rollout_id)
        request_id = f"{self._sampler.run_id}/{self._rollout.group_id}/{self._rollout.rollout_id}/{number}"
        request = asyncio.create_task(self._sample(question, prompt_ids, spans, params, request_id))
        self._running[request_id] = request
        request.add_done_callback(lambda request: self._forget(request_id, request))
        return request_id

    def _forget(self, request_id: str, request: "asyncio.Task[Turn]") -> None:
        del self._running[request_id]
        if not request.cancelled():
            request.exception()  # seen, even if its caller was cancelled and never asks

    async def _sample(
        self,
        question: _Question,
        prompt_ids: list[int],
        spans: list[RoleSpan],
        params: SamplingParams,
        request_id: str,
    ) -> Turn:
        account = Account(self._sampler.run_id, self._rollout.env_name)
        completion = await self._sampler.client.generate(prompt_ids, params, account, request_id)
        text = self._sampler.chat.decode(completion.token_ids)
        reply_start = spans[-1][2] if spans else 0
        reply = ("assistant", reply_start, len(prompt_ids) + len(completion.token_ids))
        turn = Turn(prompt_ids, completion, text, [*spans, reply], question.trainable)
        self._rollout.turns.append(turn)
        if completion.finish_reason == REFUSED:
            raise RolloutError(
                f"{len(completion.token_ids)} tokens are refused: the server was restarted, or serves other "
                "weights than this run gave it"
            )
        if completion.finish_reason == "abort":
            raise RolloutError(
                f"the server cut the completion short after {len(completion.token_ids)} tokens"
            )
        self._known.append(_Known([*question.messages, question.as_message(turn)], question.tools, turn))
        return turn

    async def _cut_short(self, request_ids: Collection[str]) -> None:
        """Aborts these requests and returns once each has recorded its answer, or has been given up."""
        requests = {key: self._running[key] for key in request_ids if key in self._running}
        loop = asyncio.get_running_loop()
        started = loop.time()
        while running := [key for key, request in requests.items() if not request.done()]:
            if loop.time() - started >= self._sampler.patience_s:
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

    def _prompt(self, question: _Question) -> tuple[list[int], list[RoleSpan]]:
        goes_on_from = [known for known in reversed(self._known) if known.precedes(question)]
        if goes_on_from:
            known = max(goes_on_from, key=lambda known: len(known.messages))
            reply = len(known.messages) - 1
            rendered = self._sampler.chat.continuation(question.messages, reply, question.tools)
            if rendered is not None:
                return self._extend(known.turn, rendered)
        rendered = self._prompts.render(question.messages, question.tools)
        return rendered.token_ids, _spans([], rendered.stops, 0)

    def _extend(self, last: Turn, rendered: Rendered) -> tuple[list[int], list[RoleSpan]]:
        """The tokens of the last turn and what the template puts after them."""
        known = [*last.prompt_ids, *last.completion.token_ids]
        repeated = known[-1] in self._sampler.chat.end_of_turn_ids and rendered.token_ids[:1] == known[-1:]
        offset = len(known) - repeated  # the model has closed its turn itself
        (role, reply_stop), *later = rendered.stops
        reply = (role, last.role_spans[-1][1], max(len(known), offset + reply_stop))
        spans = _spans([*last.role_spans[:-1], reply], later, offset)
        return known[:offset] + rendered.token_ids, spans


def group_of_request(request_id: str) -> str:
    """`demo/g5/g5-r3/0` -> `demo/g5`; see `Session._start`."""
    return request_id.rsplit("/", 2)[0]


def _spans(known: list[RoleSpan], stops: list[tuple[str, int]], offset: int) -> list[RoleSpan]:
    spans = list(known)
    for role, stop in stops:
        spans.append((role, spans[-1][2] if spans else 0, offset + stop))
    return spans
