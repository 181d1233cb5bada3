"""Environments: each is a stream of examples, and a way to attempt and score one.

- `example(index)` is a function of the seed and the index alone, so the position in the stream is one
  integer. The index grows without bound.
- `rollout` talks to the model through its session only, so every sampled token is recorded.
- An exception in `rollout` fails that rollout and nothing else.
- Everything runs on one event loop: what takes long is offloaded, or awaited.
"""

import difflib
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import numpy as np

from pellucid.config import EnvironmentConfig, EvalConfig
from pellucid.config.imports import describe, load_attribute, place_of, place_of_code, require_package
from pellucid.data import Example, Rollout
from pellucid.data.plain import brief, encodable
from pellucid.errors import ConfigError, RolloutError, UserCodeError
from pellucid.orchestrator.session import Session, stable_seed
from pellucid.workers import Kind, Workers

T = TypeVar("T")

TASKSET = "verifiers:"

BUILT_IN: Mapping[str, str] = {
    "arithmetic": "pellucid.orchestrator.built_in:Arithmetic",
    "calculator": "pellucid.orchestrator.built_in:Calculator",
    "reasoning-gym": "pellucid.orchestrator.gym:ReasoningGym",
    "reverse-text": "pellucid.orchestrator.built_in:ReverseText",
}


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Averaged over rollouts, as `metrics/ENV/NAME`."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Anything worth a look later; the keys in `orchestrator.env.state_columns` are saved."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the metrics that the reward is the sum of, by name; saved and shown beside the reward."""


class Environment(ABC):
    requires_group_scoring: ClassVar[bool] = False
    """Whether `score_group` compares the rollouts of a group; one failure then drops the whole group."""

    offloads_to: ClassVar[Kind] = "threads"
    """Where `offload` runs things."""

    num_examples: int | None = None
    """Number of different examples, None if unknown; an evaluation may not ask for more."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._workers = Workers(self.offloads_to)

    @abstractmethod
    def example(self, index: int) -> Example:
        """Returns the example at this position of the stream."""

    @abstractmethod
    async def rollout(self, example: Example, session: Session) -> Score:
        """Attempts the example once and returns its score."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Returns one score per finished rollout of a whole group. Only called if `requires_group_scoring`;
        no member has a reward before."""
        raise NotImplementedError(f"{type(self).__name__} requires group scoring but has no score_group")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Context manager around all rollouts of a run: opens and closes what needs an event loop."""
        try:
            yield
        finally:
            self._workers.close()

    async def offload(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a slow call beside the event loop and returns its result; see `offloads_to`."""
        return await self._workers.run(function, *arguments)

    def generator(self, index: int) -> random.Random:
        """Returns the random generator of one example."""
        return random.Random(stable_seed(self._seed, index))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the workers out of the pickle: another process has no use for them."""
        return {**self.__dict__, "_workers": None}


class SingleTurnEnvironment(Environment):
    """One prompt, one answer, one reward."""

    heavy_reward: ClassVar[bool] = False
    """Whether the reward takes long to compute and is offloaded."""

    repeatable_reward: ClassVar[bool] = True
    """Whether the same example and answer always have the same reward. One rollout of each batch is scored
    again, and an alarm rings if its reward differs. A reward that is heavy or `async def` is never computed
    again."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.heavy_reward and inspect.iscoroutinefunction(cls.reward):
            raise TypeError(
                f"{cls.__name__}: a heavy reward is offloaded; write it as `def`, not `async def`"
            )

    async def rollout(self, example: Example, session: Session) -> Score:
        text = await session.respond(example.messages)
        if self.heavy_reward:
            score = await self.offload(self.reward, example, text)
        else:
            score = self.reward(example, text)
        return checked_score(await score if inspect.isawaitable(score) else score, self.reward)

    @abstractmethod
    def reward(self, example: Example, text: str) -> Score | Awaitable[Score]:
        """Returns the score of an answer; may be `async def`."""


async def ask(method: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Awaits an environment's coroutine. Whatever it raises fails its rollout and nothing else."""
    try:
        answer = method(*arguments)
        if not inspect.isawaitable(answer):
            raise _wrong_answer(method, answer, "an awaitable: write it as `async def`, without `yield`")
        return await answer
    except (KeyboardInterrupt, SystemExit) as error:  # the signals of a run never come as exceptions
        raise RolloutError(
            f"{describe(error)}; an environment fails a rollout by an Exception, and never ends the process"
        ) from error


def checked_score(value: object, method: Callable[..., Any]) -> Score:
    """Returns what an environment's `method` gave, with plain floats; RolloutError if it is no Score."""
    if not isinstance(value, Score):
        raise _wrong_answer(method, value, "a Score, such as Score(1.0)")
    parts = (value.metrics, value.state, value.weights)
    if not all(type(part) is dict or isinstance(part, Mapping) for part in parts):
        raise _wrong_answer(method, value, "a Score whose metrics, state and weights are dicts by name")
    reward = _as_float(value.reward)
    if reward is None or not math.isfinite(reward):
        raise _wrong_answer(method, value.reward, "a finite number", "reward = ")
    if abs(reward) > _MAX_REWARD:
        raise _wrong_answer(method, value.reward, f"one within ±{_MAX_REWARD:.2g}: scale it", "reward = ")
    metrics = {}
    for name, metric in value.metrics.items():
        number = _as_float(metric)
        if number is None:
            raise _wrong_answer(method, metric, "a number", f"metrics[{name!r}] = ")
        metrics[encodable(str(name))] = number
    weights = {}
    for name, weight in value.weights.items():
        number = _as_float(weight)
        if number is None or not math.isfinite(number):
            raise _wrong_answer(method, weight, "a finite number", f"weights[{name!r}] = ")
        if name not in value.metrics:
            raise _wrong_answer(
                method, weight, f"its value in metrics[{name!r}], too", f"weights[{name!r}] = "
            )
        weights[encodable(str(name))] = number
    return Score(reward, metrics, value.state, weights)


def checked_scores(values: object, num_rollouts: int, method: Callable[..., Any]) -> list[Score]:
    """Returns the scores that `score_group` gave; RolloutError unless there is one per rollout."""
    if not isinstance(values, Sequence):
        raise _wrong_answer(method, values, f"a list of {num_rollouts} Scores, one per rollout")
    if len(values) != num_rollouts:
        raise _wrong_answer(method, values, f"one Score per rollout, here {num_rollouts}, not {len(values)}")
    return [checked_score(value, method) for value in values]


_EVERY_INDEX = "`example` has to answer for every index"


def draw_example(environment: Environment, label: str, index: int, remedy: str = _EVERY_INDEX) -> Example:
    """The example at a position; UserCodeError if there is none, RolloutError if it is not an Example."""
    try:
        example = environment.example(index)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        raise UserCodeError(
            f"environment {label!r} has no example {index}: {describe(error)}; {remedy}"
        ) from error
    if not isinstance(example, Example):
        raise _wrong_answer(environment.example, example, "an Example(example_id, messages, info)")
    if not isinstance(example.messages, Sequence) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in example.messages
    ):
        expected = 'a list of dicts such as {"role": "user", "content": "…"}'
        raise _wrong_answer(environment.example, example.messages, expected, "messages = ")
    return example


def _wrong_answer(method: Callable[..., Any], value: object, expected: str, what: str = "") -> RolloutError:
    name = getattr(method, "__qualname__", repr(method))
    place = place_of_code(method)
    where = name if place is None else f"{name} ({place})"
    return RolloutError(f"{where} returned {what}{brief(value)}; return {expected}")


_MAX_REWARD = float(np.finfo(np.float32).max)  # advantages are computed in float32


def _as_float(value: Any) -> float | None:
    """Returns a number of Python, numpy or torch as a float; None for anything else, above all for text."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def load_environment(config: EnvironmentConfig, seed: int) -> Environment:
    """Returns the environment of one entry. Entries with different names see different examples, and so do
    training and evaluation under one name, where examples are drawn by the seed. An environment that takes
    `held_out` is told which of the two it is for."""
    make = _maker(config)
    evaluates = isinstance(config, EvalConfig)
    name = ("eval", seed, config.label) if evaluates else (seed, config.label)
    arguments = {"seed": stable_seed(*name), **config.args}
    try:
        signature = inspect.signature(make)
        if "held_out" in signature.parameters:
            arguments.setdefault("held_out", evaluates)
        signature.bind(**arguments)
        return make(**arguments)
    except (TypeError, ValueError) as error:
        place = place_of(error)
        raise ConfigError(
            f"environment {config.id!r} refuses {config.KEY}.args = {config.args}: {error}"
            f"{'' if place is None else f' ({place})'}; it takes {inspect.signature(make)}"
        ) from error
    except Exception as error:  # of somebody's own code
        raise UserCodeError(
            f"environment {config.id!r} cannot be made with {config.KEY}.args = {config.args}: "
            f"{describe(error)}"
        ) from error


def check_environment(config: EnvironmentConfig) -> None:
    """Refuses an entry that cannot work, as far as that shows without running anybody else's code."""
    if config.id in BUILT_IN:
        load_environment(config, seed=0)
    elif config.id.startswith(TASKSET):
        _require_extra(config, "verifiers")
    else:
        require_package(_import_path(config), f"{config.KEY}.id")


def _maker(config: EnvironmentConfig) -> Callable[..., Environment]:
    key = f"{config.KEY}.id"
    if config.id.startswith(TASKSET):
        return _taskset_maker(config, key)
    if config.id == "reasoning-gym":
        _require_extra(config, "reasoning-gym")
    kind = load_attribute(_import_path(config), key)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{key} = {config.id!r} is {kind!r}; it has to be a subclass of pellucid.orchestrator.Environment"
        )
    return kind


def _require_extra(config: EnvironmentConfig, library: str) -> None:
    """Raises ConfigError if a library is not installed that comes with the extra of its name."""
    if find_spec(library.replace("-", "_")) is None:
        raise ConfigError(
            f"{config.KEY}.id = {config.id!r} needs the {library} library, which is not installed; "
            f"pip install 'pellucid[{library}]'"
        )


def _taskset_maker(config: EnvironmentConfig, key: str) -> Callable[..., Environment]:
    """Imports verifiers only now: it takes seconds."""
    _require_extra(config, "verifiers")
    from verifiers.v1 import import_taskset

    from pellucid.orchestrator.taskset import TasksetEnvironment

    taskset_id = config.id.removeprefix(TASKSET)
    try:
        import_taskset(taskset_id)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = {config.id!r} cannot be imported: {str(error).partition('. ')[0]}; a taskset is a "
            "package, or a file on PYTHONPATH, whose `__all__` names its Taskset"
        ) from error
    except Exception as error:  # of somebody's own module
        raise UserCodeError(f"{key} = {config.id!r} cannot be imported: {describe(error)}") from error
    return partial(TasksetEnvironment, taskset_id)


def _import_path(config: EnvironmentConfig) -> str:
    path = BUILT_IN.get(config.id, config.id)
    if ":" not in path:
        nearest = difflib.get_close_matches(config.id, BUILT_IN, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{config.KEY}.id = {config.id!r} is not a built-in environment ({', '.join(BUILT_IN)}), not an "
            f"import path `package.module:Class` and not `verifiers:TASKSET`; did you mean {nearest!r}?"
        )
    return path
