"""The model of an episode: verifiers' requests become turns of a session, and replies become messages.

- A reply is parsed once, to be read by rewards and tools. It is never rendered again: the session keeps its
  tokens.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from renderers import DefaultRenderer, Renderer, ToolCallParseStatus, config_from_name, create_renderer
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from pellucid.data import Turn
from pellucid.errors import PellucidError, PromptTooLongError
from pellucid.orchestrator.chat import join_parts
from pellucid.orchestrator.session import Session

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

_TOO_LONG, _REFUSED = 413, 400  # a harness retries neither

_HARMLESS = {"max_tokens", "seed", "logprobs", "top_logprobs", "parallel_tool_calls", "service_tier"}
_NEUTRAL = {
    "n": 1,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "tool_choice": "auto",
}
"""Sampling settings that are accepted: their values do not change the distribution."""

Wire = dict[str, Any]


def for_template(message: vf.Message) -> Wire:
    """In the form that chat templates expect: text as text, and the arguments of a call as an object."""
    wire: Wire = message_to_wire(message)
    content = wire["content"]
    wire["content"] = join_parts(content, "a message") if isinstance(content, list) else content or ""
    for call in wire.get("tool_calls", ()):
        function = call.get("function", {})
        function["arguments"] = _json_or_text(function.get("arguments", ""))
    return wire


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ReplyParser:
    """Content, reasoning and tool calls of what the model wrote.

    By default `<think>…</think>` is reasoning, and `<tool_call>{"name": …, "arguments": {…}}</tool_call>` a
    call, as Qwen, Hermes and many others write it. For other models, `renderer` names a parser of the
    `renderers` library.
    """

    def __init__(self, tokenizer: Any, renderer: str | None) -> None:
        self._renderer: Renderer = (
            DefaultRenderer(tokenizer)
            if renderer is None
            else create_renderer(tokenizer, config_from_name(renderer))
        )
        self._finds_calls = renderer is not None

    def parse(self, turn: Turn, tools: Sequence[Wire]) -> vf.AssistantMessage:
        prompt_ids, token_ids, *_ = turn.tokens
        parsed = self._renderer.parse_response(
            token_ids.tolist(), tools=list(tools) or None, prompt_ids=prompt_ids.tolist()
        )
        content, calls = parsed.content, []
        if self._finds_calls:
            calls = [
                (call.name, call.arguments)
                for call in parsed.tool_calls
                if call.name and call.status != ToolCallParseStatus.UNKNOWN_TOOL
            ]
        elif tools:
            content, calls = split_calls(content)
        return vf.AssistantMessage(
            content=content or None,
            reasoning_content=parsed.reasoning_content,
            tool_calls=[
                vf.ToolCall(id=f"call_{index}", name=name, arguments=_as_text(arguments))
                for index, (name, arguments) in enumerate(calls)
            ]
            or None,
        )


def split_calls(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """`ask <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` -> `("ask ", [("f", {"x": 1})])`.

    A block that is not such a call stays text.
    """
    calls = []
    rest = text
    for block in _CALL.finditer(text):
        call = _json_or_text(block[1])
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]:
            calls.append((call["name"], call.get("arguments", {})))
            rest = rest.replace(block[0], "", 1)
    return rest, calls


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


class SessionClient(vf.Client):
    """The model of one trace."""

    def __init__(self, session: Session, trace: vf.Trace, parser: ReplyParser) -> None:
        self._session = session
        self._trace = trace
        self._parser = parser
        self.turns: list[Turn] = []
        """Turns sampled for this trace."""

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            raise vf.ProviderError(
                f"{type(dialect).__name__}: only chat completions keep tokens as they were sampled; choose a "
                "harness that uses them",
                status_code=_REFUSED,
            )
        request = (
            dialect.parse_request(body)
            if turn is None
            else vf.Request(messages=turn.prompt, tools=turn.tools)
        )
        try:
            return await self._ask(request, dialect.parse_sampling(body), body["model"])
        except PromptTooLongError as error:
            raise vf.ProviderError(f"prompt is too long: {error}", status_code=_TOO_LONG) from error
        except PellucidError as error:
            raise vf.ProviderError(str(error), status_code=_REFUSED) from error

    async def _ask(self, request: vf.Request, sampling: vf.SamplingConfig, model: str) -> vf.Response:
        tools = [tool_to_wire(tool) for tool in request.tools or ()]
        self._check(sampling)
        reply: vf.AssistantMessage | None = None

        def as_message(turn: Turn) -> dict[str, Any]:
            nonlocal reply
            reply = self._parser.parse(turn, tools)
            return for_template(reply)

        turn = await self._session.sample(
            [for_template(message) for message in request.messages],
            tools=tools,
            trainable=self._trace.agent.trainable,
            max_tokens=sampling.max_tokens,
            as_message=as_message,
        )
        self.turns.append(turn)
        assert reply is not None
        return _response(turn, reply, model)

    def _check(self, sampling: vf.SamplingConfig) -> None:
        """Refuses settings that change the distribution or the temperature of tokens that train."""
        neutral = {**_NEUTRAL, "temperature": self._session.temperature}
        for name, value in sampling.model_dump(exclude_none=True).items():
            if name not in _HARMLESS and (name not in neutral or value != neutral[name]):
                raise vf.ProviderError(
                    f"the harness or an agent's `sampling` asks for {name} = {value!r}; a run samples with "
                    f"temperature = {self._session.temperature} and nothing else: leave it out, or set "
                    "orchestrator.env.sampling",
                    status_code=_REFUSED,
                )


def _response(turn: Turn, reply: vf.AssistantMessage, model: str) -> vf.Response:
    prompt_ids, token_ids, logprobs, *_ = turn.tokens
    response = vf.Response(
        id="",
        created=0,
        model=model,
        message=reply,
        finish_reason="tool_calls" if reply.tool_calls else turn.finish_reason,
        usage=vf.Usage(prompt_tokens=turn.num_prompt_tokens, completion_tokens=turn.num_tokens),
        tokens=vf.TurnTokens.model_construct(
            prompt_ids=prompt_ids.tolist(),
            completion_ids=token_ids.tolist(),
            completion_logprobs=logprobs.tolist(),
        ),
    )
    response.raw = serialize_completion(response, model)
    return response


class SessionInterception(Interception):
    """verifiers' own servers, with the client of the rollout in place of one that would go over HTTP."""

    def __init__(self, inner: Interception) -> None:
        super().__init__()
        self._inner = inner
        self.clients: dict[str, SessionClient] = {}
        """Client of each trace, by its id."""

    async def start(self) -> None:
        """Does nothing: whoever made the inner interception started it."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        async with self._inner.acquire(session) as slot:
            session.client = self.clients[session.trace.id]
            yield slot
