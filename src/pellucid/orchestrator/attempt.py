"""The attempts at one example. An exception in an environment, session or client fails that rollout alone.

`attempt` is the boundary where failures become data: type, message and line of the environment's code are
kept in the rollout. Tracebacks are for whoever mends the environment: `FailureLog` logs each of them once.
"""

import asyncio
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from pellucid.config.imports import describe
from pellucid.data import Example, Rollout, TrainingMode
from pellucid.errors import PellucidError
from pellucid.orchestrator.environment import Environment, Score, checked_score, checked_scores
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
            score = await self._converse(rollout)
            _apply(rollout, checked_score(score, self.environment.rollout))
            if self.scorer is not None:
                await within(self.timeout_s, self.scorer.score(rollout))
            self.scored.append(rollout)
            if self.environment.requires_group_scoring and len(self.scored) == self.size:
                scores = await self.environment.score_group(self.scored)
                checked = checked_scores(scores, len(self.scored), self.environment.score_group)
                for member, score in zip(self.scored, checked, strict=True):
                    _apply(member, score)
            if rollout.num_sampled == 0:
                _fail(rollout, EMPTY, f"{EMPTY}: the environment returned a score but sampled nothing")
        except PellucidError as error:
            _fail(rollout, type(error).__name__, f"{type(error).__name__}: {error}")
        except Exception as error:
            _fail(rollout, type(error).__name__, describe(error))
            rollout.traceback = "".join(traceback.format_exception(error))
        except asyncio.CancelledError:
            _fail(rollout, "CancelledError", "CancelledError: the attempt was cancelled")
            raise

    async def _converse(self, rollout: Rollout) -> Score:
        session = Session(rollout, self.sampler, self.prompts)
        try:
            return await within(self.timeout_s, self.environment.rollout(self.example, session))
        finally:
            await session.close()


class FailureLog:
    """Failed rollouts in the log: one line each, with the traceback where an environment fails anew."""

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def note(self, rollout: Rollout) -> None:
        frames = (line for line in rollout.traceback.splitlines() if line.startswith("  File "))
        failure = (rollout.env_name, rollout.error_type or "", *frames)
        is_new = failure not in self._known
        self._known.add(failure)
        detail = f"\n{rollout.traceback.rstrip()}" if rollout.traceback and is_new else ""
        log.warning(
            "rollout %s of %s failed: %s%s", rollout.rollout_id, rollout.env_name, rollout.error, detail
        )


def _fail(rollout: Rollout, error_type: str, error: str) -> None:
    rollout.error_type = error_type
    rollout.error = error


def _apply(rollout: Rollout, score: Score) -> None:
    rollout.reward = score.reward
    rollout.metrics = dict(score.metrics)
    for column in rollout.state.keys() & score.state.keys():
        rollout.state[column] = _as_json(score.state[column])


def _as_json(value: object) -> str:
    """What JSON has no form for is described in words."""
    return orjson.dumps(
        value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    ).decode()
