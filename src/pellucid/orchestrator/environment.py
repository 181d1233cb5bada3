"""What an environment is: a stream of examples, and a way to attempt and score one.

- `example(index)` is a function of the seed and the index alone, so the position in the stream is one
  integer. The index grows without bound.
- `rollout` talks to the model through its session only, so every sampled token is recorded.
- An exception in `rollout` fails that rollout and nothing else.
"""

import difflib
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pellucid.config import EnvironmentConfig, EvalConfig
from pellucid.config.imports import load_attribute
from pellucid.data import Example, Rollout
from pellucid.errors import ConfigError
from pellucid.orchestrator.seeds import stable_seed
from pellucid.orchestrator.session import Session

BUILT_IN: Mapping[str, str] = {
    "reverse-text": "pellucid.orchestrator.environments.reverse_text:ReverseText",
}


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    requires_group_scoring: ClassVar[bool] = False
    """Rewards compare the rollouts of a group: one failure drops the whole group."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    @abstractmethod
    def example(self, index: int) -> Example:
        """The example at this position of the stream."""

    @abstractmethod
    async def rollout(self, example: Example, session: Session) -> Score:
        """One attempt, scored."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score per finished rollout of a whole group, in place of its own; only if group-scored."""
        raise NotImplementedError(f"{type(self).__name__} requires group scoring but has no score_group")

    def generator(self, index: int) -> random.Random:
        """The random numbers of one example."""
        return random.Random(stable_seed(self._seed, index))


class SingleTurnEnvironment(Environment):
    """One prompt, one answer, one reward."""

    async def rollout(self, example: Example, session: Session) -> Score:
        return self.reward(example, await session.respond(example.messages))

    @abstractmethod
    def reward(self, example: Example, text: str) -> Score:
        """The score of an answer."""


def load_environment(config: EnvironmentConfig, seed: int) -> Environment:
    """The environment of one entry; entries with different names see different examples.

    An evaluation has seeds of its own: an environment that draws its examples by seed measures on others
    than it trains on, even under the same name.
    """
    kind = _environment_class(config)
    name = ("eval", seed, config.label) if isinstance(config, EvalConfig) else (seed, config.label)
    arguments = {"seed": stable_seed(*name), **config.args}
    try:
        inspect.signature(kind).bind(**arguments)
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {config.id!r} refuses {config.KEY}.args = {config.args}: {error}; "
            f"it takes {inspect.signature(kind)}"
        ) from error


def _environment_class(config: EnvironmentConfig) -> type[Environment]:
    env_id, key = config.id, f"{config.KEY}.id"
    path = BUILT_IN.get(env_id, env_id)
    if ":" not in path:
        nearest = difflib.get_close_matches(env_id, BUILT_IN, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{key} = {env_id!r} is not a built-in environment ({', '.join(BUILT_IN)}) and not "
            f"an import path `package.module:Class`; did you mean {nearest!r}?"
        )
    kind = load_attribute(path, key)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{key} = {env_id!r} is {kind!r}; it has to be a subclass of pellucid.orchestrator.Environment"
        )
    return kind
