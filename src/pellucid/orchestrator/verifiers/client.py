"""verifiers' side of a model call: its request becomes a question to the session of the rollout."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from pellucid.data import Turn
from pellucid.errors import PellucidError, PromptTooLongError
from pellucid.orchestrator.session import Session
from pellucid.orchestrator.verifiers.messages import ReplyParser, for_template

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
    completion = turn.completion
    finish_reason = "tool_calls" if reply.tool_calls else completion.finish_reason
    response = vf.Response(
        id="",
        created=0,
        model=model,
        message=reply,
        finish_reason=finish_reason,
        usage=vf.Usage(prompt_tokens=len(turn.prompt_ids), completion_tokens=len(completion.token_ids)),
        tokens=vf.TurnTokens.model_construct(
            prompt_ids=list(turn.prompt_ids),
            completion_ids=completion.token_ids,
            completion_logprobs=completion.logprobs,
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
