"""A taskset as an environment: its tasks are examples, its episodes rollouts.

- The tasks of a finite taskset come in another order in every pass, which the seed alone decides; those of an
  infinite one in the order in which it yields them.
- An episode trains the trace of its one trainable agent. Whatever else the model sampled meanwhile, for a
  judge's seat or for an attempt that verifiers discarded, is accounted for as `untrainable`.
- An episode that is not ok fails its rollout, with verifiers' own error.
"""

import logging
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig

from pellucid.data import Example
from pellucid.errors import RolloutError
from pellucid.orchestrator.environment import Environment, Score
from pellucid.orchestrator.session import Session, stable_seed
from pellucid.orchestrator.verifiers.client import (
    ReplyParser,
    SessionClient,
    SessionInterception,
    for_template,
)
from pellucid.orchestrator.verifiers.harness import HARNESS_ID, ChatHarnessConfig

_ONE_LOG_LINE_PER_FAILURE = ("agent", "env", "interception", "rollout", "session")


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
