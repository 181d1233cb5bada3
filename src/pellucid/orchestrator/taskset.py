"""Tasksets of the `verifiers` library as environments: their tasks are examples, their episodes rollouts.

    our rollout ── verifiers' episode ── harness ── verifiers' interception ── SessionClient ── our session

- Every model call of an episode ends in the session of the rollout, in this process: token ids, logprobs,
  policy versions, request ids, cancellation and the ledger are those of any other environment. Rewards,
  metrics, stops, tools and scoring are verifiers' own.
- A reply is parsed once, to be read by rewards and tools. It is never rendered again: the session keeps its
  tokens.
- The tasks of a finite taskset come in another order in every pass, which the seed alone decides; those of an
  infinite one in the order in which it yields them.
- An episode trains the trace of its one trainable agent. Whatever else the model sampled meanwhile, for a
  judge's seat or for an attempt that verifiers discarded, is accounted for as `untrainable`.
- An episode that is not ok fails its rollout, with verifiers' own error.
"""

import json
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from renderers import DefaultRenderer, Renderer, ToolCallParseStatus, config_from_name, create_renderer
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.session import RolloutSession

from pellucid.data import Example, Turn
from pellucid.errors import PellucidError, PromptTooLongError, RolloutError
from pellucid.orchestrator.chat import join_parts
from pellucid.orchestrator.environment import Environment, Score
from pellucid.orchestrator.session import Session, stable_seed
from pellucid_chat import HARNESS_ID, ChatHarnessConfig

_ONE_LOG_LINE_PER_FAILURE = ("agent", "env", "interception", "rollout", "session")
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
        self._finds_calls = renderer is not None
        self._renderer: Renderer = DefaultRenderer(tokenizer)
        if renderer is not None:
            self._renderer = create_renderer(tokenizer, config_from_name(renderer))

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
        if turn is None:
            request = dialect.parse_request(body)
        else:
            request = vf.Request(messages=turn.prompt, tools=turn.tools)
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


class TasksetEnvironment(Environment):
    def __init__(
        self,
        taskset_id: str,
        *,
        seed: int,
        env: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
        renderer: str | None = None,
        **taskset: Any,
    ) -> None:
        """`taskset` are the taskset's own settings, `env` the rest of verifiers' `[env]` block."""
        super().__init__(seed=seed)
        quiet_verifiers()
        try:
            self._env = _load(taskset_id, env or {}, taskset)
            self._tasks = _Tasks(self._env.taskset.select(vf.SelectConfig(**(select or {}))), seed)
        except ValidationError as error:
            raise ValueError(_explain(error)) from error
        self.num_examples = self._tasks.num_tasks
        self._renderer = renderer
        self._parser: ReplyParser | None = None
        self._interception: SessionInterception | None = None

    def example(self, index: int) -> Example:
        task = self._tasks.at(index)
        system_prompt, prompt = task.data.system_prompt, task.data.prompt
        opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        rest = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [for_template(message) for message in prompt or ()]
        )
        return Example(str(task.data.idx), [*opening, *rest], {"task": task})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with super().serving(), self._env.serving():
            # There is no public way to an environment's interception; the version of verifiers is pinned.
            self._interception = SessionInterception(self._env._interception)
            self._env._interception = self._interception
            yield

    async def rollout(self, example: Example, session: Session) -> Score:
        if self._interception is None:
            raise RolloutError("a taskset is played while it is being served; see Environment.serving")
        if self._parser is None:
            self._parser = ReplyParser(session.chat.tokenizer, self._renderer)
        clients = self._interception.clients
        met: dict[str, SessionClient] = {}
        parser = self._parser

        def meet(trace: vf.Trace) -> None:
            met[trace.id] = clients[trace.id] = SessionClient(session, trace, parser)

        def discard(trace: vf.Trace) -> None:
            for turn in met[trace.id].turns:
                session.withdraw(turn)

        try:
            episode = await self._env.run_episode(
                example.info["task"], _context(session), on_trace=meet, on_discard=discard
            )
        finally:
            for trace_id in met:
                del clients[trace_id]
        _withdraw_untrainable(episode, met, session)
        return _score(episode)


def quiet_verifiers() -> None:
    """Silences verifiers' log lines about rollouts and failures: the run logs both itself."""
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    for name in _ONE_LOG_LINE_PER_FAILURE:
        logging.getLogger(f"verifiers.v1.{name}").setLevel(logging.CRITICAL)
    for name in ("aiohttp.access", "httpx", "httpx2", "mcp"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _load(taskset_id: str, env: Mapping[str, Any], taskset: Mapping[str, Any]) -> vf.Env:
    config = vf.resolve_env_config({**env, "taskset": {"id": taskset_id, **taskset}})
    if vf.default_harness_id(taskset_id) == "bash":
        config = config.model_copy(update=_in_process(config))
    return vf.load_environment(config)


def _in_process(config: vf.EnvConfig) -> dict[str, vf.AgentConfig]:
    """Returns the agents; those without a harness get `pellucid-chat`, without a runtime a subprocess."""
    agents = {}
    for name, agent in agent_config_fields(config).items():
        update: dict[str, Any] = {}
        if agent.harness is None:
            update["harness"] = ChatHarnessConfig(id=HARNESS_ID)
        if "runtime" not in agent.model_fields_set:
            update["runtime"] = SubprocessConfig()
        agents[name] = agent.model_copy(update=update)
    return agents


class _Tasks:
    """The tasks of a taskset by their place in the stream.

    A finite one comes over and over. An infinite one can only be read forwards; going back starts it anew.
    """

    def __init__(self, taskset: vf.Taskset, seed: int) -> None:
        self._taskset = taskset
        self._seed = seed
        self._tasks: list[vf.Task] = list(taskset) if taskset.bounded else []
        if taskset.bounded and not self._tasks:
            raise ValueError("no task is left; check the taskset's own args and `select`")
        self._epoch = -1
        self._order: list[int] = []
        self._stream: Iterator[vf.Task] = iter(())
        self._position = math.inf

    @property
    def num_tasks(self) -> int | None:
        """Number of different tasks; None if there is no end to them."""
        return len(self._tasks) or None

    def at(self, index: int) -> vf.Task:
        if not self._tasks:
            if index < self._position:
                self._stream, self._position = iter(self._taskset), 0
            task = next(islice(self._stream, index - int(self._position), None))
            self._position = index + 1
            return task
        epoch, place = divmod(index, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self._tasks)))
            random.Random(stable_seed(self._seed, "epoch", epoch)).shuffle(self._order)
        return self._tasks[self._order[place]]


def _context(session: Session) -> vf.ModelContext:
    """A `train` client, so that verifiers expects token ids; it is never asked, see `SessionInterception`."""
    return vf.ModelContext(
        model="policy",
        client=vf.TrainClientConfig(base_url="http://localhost:0/v1", api_key_var="PELLUCID_NEEDS_NO_KEY"),
        sampling=vf.SamplingConfig(temperature=session.temperature, max_tokens=session.max_tokens),
    )


def _withdraw_untrainable(
    episode: vf.Episode, clients: Mapping[str, SessionClient], session: Session
) -> None:
    """Withdraws branches that verifiers marks as untrainable, such as an abandoned compaction."""
    for trace in episode.traces:
        for branch in trace.branches:
            if not branch.trainable:
                for turn in clients[trace.id].turns:
                    if turn.known_ids.tolist() == branch.token_ids:
                        session.withdraw(turn)


def _score(episode: vf.Episode) -> Score:
    if not episode.ok:
        raise _failure(episode)
    trainable = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trainable) != 1:
        names = [trace.agent.name for trace in trainable]
        raise RolloutError(
            f"an episode has {len(trainable)} trainable agents {names}; a rollout has one reward, so exactly "
            "one agent may be trainable"
        )
    [trace] = trainable
    if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
        raise RolloutError(f"the scoring of {', '.join(unscored)} did not finish ({trace.stop_condition})")
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    state = {name: getattr(trace.state, name) for name in type(trace.state).model_fields}
    return Score(
        trace.reward,
        {**scores, **metrics},
        {
            **state,
            "info": trace.info,
            "task": trace.task.data.model_dump(mode="json"),
            "stop_condition": trace.stop_condition,
        },
        {name: reward.weight for name, reward in trace.rewards.items() if name not in metrics},
    )


def _failure(episode: vf.Episode) -> Exception:
    errors = [error for owner in (*episode.traces, episode) for error in owner.errors]
    if not errors:
        return RolloutError("the episode failed and does not say why")
    last = errors[-1]
    known: type[Exception] | None = getattr(vf, last.type, None)
    return known(last.message) if known else RolloutError(f"{last.type}: {last.message}")


def _explain(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} = {each['input']!r}: {each['msg']}" for each in error.errors()
    )
