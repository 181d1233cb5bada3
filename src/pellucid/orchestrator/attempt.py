"""The attempts at one example. An exception in an environment, session or client fails that rollout alone.

`attempt` is the boundary where failures become data: type and message are kept in the rollout. Where it
was raised is for whoever mends the environment, in the log at level DEBUG.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from pellucid.data import Example, Rollout, TrainingMode
from pellucid.errors import RolloutError
from pellucid.orchestrator.environment import Environment, Score
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.tasks import within
from pellucid.orchestrator.teacher import Scorer

log = logging.getLogger(__name__)

EMPTY = "EmptyRollout"
"""Error type of a rollout in which nothing was sampled."""


@dataclass(slots=True)
class GroupRun:
    """One example, its prompt rendered once, and the rollouts that attempt it."""

    group_id: str
    env_name: str
    environment: Environment
    example: Example
    size: int
    sampler: Sampler
    prompts: PromptCache
    timeout_s: float
    state_columns: Sequence[str] = ()
    training_mode: TrainingMode = TrainingMode.RL
    scorer: Scorer | None = None
    """Who adds a teacher's logprobs to what was sampled; None: nobody."""

    scored: list[Rollout] = field(default_factory=list)

    def open_rollout(self, rollout_id: str) -> Rollout:
        return Rollout(
            rollout_id,
            self.group_id,
            self.example,
            self.env_name,
            self.sampler.temperature,
            state=dict.fromkeys(self.state_columns, "null"),
            training_mode=self.training_mode,
        )

    async def attempt(self, rollout: Rollout) -> None:
        """Leaves the rollout scored, or with the reason why it failed."""
        try:
            _apply(rollout, await self._converse(rollout))
            if self.scorer is not None:
                await within(self.timeout_s, self.scorer.score(rollout))
            self.scored.append(rollout)
            if self.environment.requires_group_scoring and len(self.scored) == self.size:
                scores = await self.environment.score_group(self.scored)
                for member, score in zip(self.scored, scores, strict=True):
                    _apply(member, score)
            if rollout.num_sampled == 0:
                _fail(rollout, EMPTY, "the environment returned a score but sampled nothing")
        except Exception as error:
            log.debug("rollout %s of %s failed", rollout.rollout_id, self.env_name, exc_info=error)
            _fail(rollout, type(error).__name__, str(error))
        except asyncio.CancelledError:
            _fail(rollout, "CancelledError", "the attempt was cancelled")
            raise

    async def _converse(self, rollout: Rollout) -> Score:
        session = Session(rollout, self.sampler, self.prompts)
        try:
            return await within(self.timeout_s, self.environment.rollout(self.example, session))
        finally:
            await session.close()


def _fail(rollout: Rollout, error_type: str, reason: str) -> None:
    rollout.error_type = error_type
    rollout.error = f"{error_type}: {reason}"


def _apply(rollout: Rollout, score: Score) -> None:
    reward = float(score.reward)
    if not math.isfinite(reward):
        raise RolloutError(f"the environment returned reward = {reward}; rewards are finite numbers")
    rollout.reward = reward
    rollout.metrics = {name: float(value) for name, value in score.metrics.items()}
    for column in rollout.state.keys() & score.state.keys():
        rollout.state[column] = _as_json(score.state[column])


def _as_json(value: object) -> str:
    """What JSON has no form for is described in words."""
    return orjson.dumps(
        value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    ).decode()
